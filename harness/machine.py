"""The site for programs: recipes.json, llms.txt, sitemap.xml and the feed."""

from __future__ import annotations

import json
import re
import uuid
from html import escape

from harness import errors
from harness.origin import Origin
from harness.outcomes import Result
from harness.rows import Row

ABOUT = "Runnable recipes for training loops in Flax NNX, each executed under several Flax releases."


def recipes(
    results: list[Result], rows: list[Row], groups: list[tuple[str, list[str]]], origin: Origin
) -> str:
    """`recipes.json`: every recipe with its snippet, its messages by row and its outcomes. Its schema is published with it.

    Addresses are absolute where the build knows the site's, else relative to its root.
    """
    group_of = {name: caption for caption, names in groups for name in names}
    listed = [
        {
            "name": result.recipe.name,
            "title": result.recipe.title.replace("`", ""),
            "summary": result.recipe.summary,
            "url": f"{origin.site}recipes/{result.recipe.name}.html",
            "group": group_of[result.recipe.name],
            "answers": [_report(report) for report in result.recipe.answers],
            "symptoms": list(result.recipe.symptoms),
            "needs": {
                "flax": str(result.recipe.needs.flax),
                "jax": str(result.recipe.needs.jax),
                "mode": result.recipe.needs.mode,
                "devices": result.recipe.devices,
            },
            "snippet": result.recipe.snippet,
            "messages": [
                {
                    "error": place.declared.error,
                    "match": place.declared.match,
                    "rows": [row.name for row in place.messages],
                    "url": origin.site + place.address,
                }
                for place in errors.places([result])
            ],
            "outcomes": {
                row.name: {"kind": outcome.kind, "detail": outcome.detail}
                for row, outcome in result.outcomes.items()
            },
            "executed": {
                row.name: {key: notebook.metadata["executed"][key] for key in ("date", "python")}
                for row, notebook in result.notebooks.items()
            },
        }
        for result in results
    ]
    environments = [
        {"name": row.name, "flax": str(row.flax), "jax": str(row.jax), "mode": row.mode, "why": row.why}
        for row in rows
    ]
    whole = {"$schema": "recipes.schema.json", "rows": environments, "recipes": listed}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _report(name: str) -> dict[str, str]:
    """`owner/repository#1` and its address."""
    repository, _, number = name.partition("#")
    return {"name": name, "url": f"https://github.com/{repository}/issues/{number}"}


def llms(
    results: list[Result], groups: list[tuple[str, list[str]]], pages: dict[str, str], origin: Origin
) -> str:
    """`llms.txt`: what the site has, as links to the Markdown of its pages. `pages` maps a page's name to its title."""
    by_name = {result.recipe.name: result.recipe for result in results}
    lines = ["# NNX Loop Recipes", "", f"> {ABOUT}", ""]
    for caption, names in groups:
        lines += [f"## {caption}", ""]
        for recipe in (by_name[name] for name in names):
            lines.append(f"- [{recipe.title}]({origin.site}recipes/{recipe.name}.md): {recipe.summary}")
        lines.append("")
    lines += ["## About the site", ""]
    lines += [f"- [{title}]({origin.site}{name}.md)" for name, title in pages.items()]
    lines.append(f"- [Everything as data]({origin.site}recipes.json)")
    return "\n".join(lines) + "\n"


def sitemap(pages: list[str], origin: Origin) -> str:
    """`sitemap.xml` of the pages, which needs the site's address."""
    places = "".join(f"<url><loc>{escape(origin.site + page)}</loc></url>\n" for page in sorted(pages))
    space = "http://www.sitemaps.org/schemas/sitemap/0.9"
    return f'<?xml version="1.0" encoding="utf-8"?>\n<urlset xmlns="{space}">\n{places}</urlset>\n'


def feed(changelog: str, origin: Origin) -> str:
    """`feed.xml`, an Atom feed of the dated sections of CHANGELOG.md. Raises ValueError for a heading without a date."""
    entries = []
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", heading) or _id(heading) in "".join(entries):
            raise ValueError(
                f"CHANGELOG.md: expected one heading `## YYYY-MM-DD` for a day, found `## {heading}`"
            )
        items = [re.sub(r"\s+", " ", item).strip() for item in re.split(r"^- ", body, flags=re.MULTILINE)[1:]]
        html = "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
        entries.append(
            f"<entry><id>{_id(heading)}</id><title>{heading}</title><updated>{heading}T00:00:00Z</updated>"
            f'<link href="{escape(origin.site)}docs/releases.html"/><content type="html">{escape(html)}</content></entry>'
        )
    latest = max(re.findall(r"^## (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE))
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n<feed xmlns="http://www.w3.org/2005/Atom">\n'
        f"<id>{_id('feed')}</id><title>NNX Loop Recipes: changes</title><updated>{latest}T00:00:00Z</updated>"
        f"<author><name>NNX Loop Recipes</name></author>\n{chr(10).join(entries)}\n</feed>\n"
    )


def _id(name: str) -> str:
    """An id that stays the same wherever the site is published."""
    return uuid.uuid5(uuid.NAMESPACE_URL, f"nnx-loop-recipes/{name}").urn
