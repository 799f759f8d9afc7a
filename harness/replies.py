"""What is copied from a page to somewhere else: the snippet, and a reply for an issue thread."""

from __future__ import annotations

from html import escape

from harness.outcomes import Result, dates

PLACE = "PAGE-ADDRESS"  # the browser puts the address in, with the release that the reader chose


def reply(result: Result, address: str = PLACE) -> str:
    """A reply in GitHub's Markdown: the answer, the tested snippet, the permanent link, and where it was executed."""
    recipe, ticks = result.recipe, "```"
    while ticks in recipe.snippet:
        ticks += "`"
    rows = ", ".join(
        f"{row.flax} ({row.mode} mode)" if row.mode == "tree" else row.name for row in result.notebooks
    )
    raising = [
        f"{outcome} on {row.name}" for row, outcome in result.outcomes.items() if outcome.kind == "raises"
    ]
    apart = f" {recipe.outcome_heading}: {', '.join(raising)}." if raising else ""
    return (
        f"{recipe.summary}\n\n{ticks}python\n{recipe.snippet}{ticks}\n\n"
        f"From [{recipe.title}]({address}), where this code and its proofs were executed with Flax {rows} "
        f"({dates(result)}).{apart}\n"
    )


def buttons(result: Result) -> str:
    """The buttons under a recipe's title with the texts they copy (HTML). They show where JavaScript runs."""
    texts = {"snippet": result.recipe.snippet, "reply": reply(result)}
    labels = {"snippet": "Copy snippet", "reply": "Copy as reply"}
    made = "".join(
        f'<button type="button" data-copy="{name}">{label}</button>' for name, label in labels.items()
    )
    kept = "".join(f'<template id="copy-{name}">{escape(text)}</template>' for name, text in texts.items())
    return f'<div class="copy" hidden>{made}<span role="status"></span>{kept}</div>'
