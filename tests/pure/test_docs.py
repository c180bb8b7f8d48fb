"""The newcomer's page names every package, and every file that it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_life_of_a_request_names_every_package() -> None:
    text = (ROOT / "docs" / "life-of-a-request.md").read_text()
    packages = {p.parent.name for p in (ROOT / "twostroke").glob("*/__init__.py")}
    assert packages == {name for name in packages if f"`{name}/" in text}


def test_files_named_in_the_docs_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text()
        for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
            assert (ROOT / "twostroke" / name).exists() or (ROOT / name).exists(), (page, name)
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), (page, link)
