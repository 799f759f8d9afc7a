"""What the measurements page compares (`steps.py`), and how it is measured (`measure.py`)."""
