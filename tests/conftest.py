"""Options of the tests."""


def pytest_addoption(parser):
    parser.addoption("--row", help="the row whose environment this is, for example 0.12.2")
