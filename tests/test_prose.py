"""English of docstrings, comments and pages: openings of docstrings, and phrases that peers avoid.

A phrase is counted per 1,000 words. The ceilings are about twice the worst of eight peers (FSDP2, Inductor's passes,
torchtitan, Thunder, xDSL, ir-py, Equinox, AutoParallel). `python -m tests.test_prose` prints the rates.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.layers import ROOT, modules, tree

PHRASES = {
    "that of": (r"\b(that of|those of|those that|those which)\b", 0.25),
    "behind": (r"\bbehind\b", 0.16),
    "beside": (r"\bbesides?\b", 0.06),
    "in the place of": (r"in the place of", 0.02),
    "other than": (r"\b(another|others?|otherwise) than\b", 0.10),
    "is no": (r"\b(is|are|has|have) no\b", 1.6),
    "of its own": (r"(of its own|of their own|of the user's|of torch's|of Inductor's)", 0.06),
    "nobody": (r"\b(whoever|nobody|somebody)\b", 0.04),
    "as many": (r"\b(so|as) many\b", 0.12),
    "let go of": (r"\b(lets? go of|as ever|anew)\b", 0.05),
}
# Percent of functions' docstrings that open so: at most for the first two, at least for the verbs.
WHAT, WHETHER, IMPERATIVE = 1.5, 1.5, 80
VERBS = (
    "Add|Advance|Allocate|Allow|Answer|Append|Apply|Assign|Assume|Bind|Break|Build|Call|"
    "Cast|Check|Choose|Clear|Close|Collect|Compare|Compile|Compute|Construct|Convert|Copy|"
    "Count|Create|Cut|Decide|Decode|Delete|Describe|Determine|Disable|Draw|Drop|Emit|"
    "Empty|Enable|Encode|Ensure|Enter|Escape|Estimate|Evaluate|Exchange|Expand|Export|"
    "Extract|Fill|Find|Fold|Follow|Forget|Format|Free|Gather|Generate|Get|Give|Group|"
    "Guard|Handle|Hide|Hold|Hash|Import|Include|Infer|Insert|Inspect|Install|Iterate|Join"
    "|Keep|Launch|Leave|Let|Limit|List|Load|Log|Look|Lower|Make|Mark|Match|Measure|"
    "Merge|Move|Name|Open|Order|Pack|Pad|Parse|Partition|Patch|Place|Plan|Predict|"
    "Prefetch|Prepare|Print|Propagate|Pull|Push|Put|Raise|Read|Rebuild|Recompute|Record|"
    "Reduce|Refuse|Register|Reject|Release|Remove|Rename|Render|Repeat|Replace|Report|"
    "Require|Reset|Reshard|Resolve|Restore|Return|Rewrite|Round|Run|Save|Scale|Schedule|"
    "Search|Select|Send|Serialize|Set|Shard|Show|Sign|Simulate|Skip|Sort|Split|Start|"
    "Stop|Store|Sum|Suppress|Swap|Take|Tell|Test|Time|Trace|Train|Transform|Translate|"
    "Try|Turn|Unpack|Update|Use|Validate|Verify|Visit|Wait|Walk|Warn|Wrap|Write|Yield"
)


# Code blocks, comments and inline code of a page.
NOT_PROSE = re.compile(r"^( *)```.*?^\1```|<!--.*?-->|`[^`]*`", re.MULTILINE | re.DOTALL)
GROUPS = ("package", "scripts", "tests", "pages")


def sources(group: str) -> list[Path]:
    """Return the Python files of the package, of benchmarks and examples, or of the tests."""
    if group == "package":
        return list(modules().values())
    folders = ("tests",) if group == "tests" else ("benchmarks", "examples")
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


@functools.cache
def texts(group: str) -> tuple[list[str], list[str]]:
    """Return all docstrings and comments of a group of sources, and the docstrings of its functions.

    A test's docstring says what holds, so its opening does not count.
    """
    every: list[str] = []
    functions: list[str] = []
    for path in sources(group):
        source = path.read_text()
        for node in ast.walk(tree(path)):
            documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            if documented and (doc := ast.get_docstring(node)):
                every.append(doc)
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("test_"):
                    functions.append(doc)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        every += [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return every, functions


@functools.cache
def prose(group: str) -> str:
    """Return the docstrings and comments of sources, or the words of all pages."""
    if group == "pages":
        pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        return "\n".join(NOT_PROSE.sub("", page.read_text()) for page in pages)
    return "\n".join(texts(group)[0])


def rate(pattern: str, group: str) -> float:
    """Return how often a pattern occurs per 1,000 words."""
    text = prose(group)
    return 1000 * len(re.findall(pattern, text, re.IGNORECASE)) / len(re.findall(r"[A-Za-z']+", text))


def percent(openings: str, group: str) -> float:
    """Return the percentage of functions' docstrings that open with one of the words, separated by "|"."""
    found = texts(group)[1]
    return 100 * sum(re.match(rf"({openings})\b", doc) is not None for doc in found) / len(found)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", PHRASES)
def test_phrases(name: str, group: str) -> None:
    pattern, ceiling = PHRASES[name]
    assert rate(pattern, group) <= ceiling


@pytest.mark.parametrize("group", ["package", "scripts", "tests"])
def test_openings(group: str) -> None:
    assert percent("What", group) <= WHAT
    assert percent("Whether", group) <= WHETHER
    assert percent(VERBS, group) >= IMPERATIVE


if __name__ == "__main__":
    for group in ("package", "scripts", "tests"):
        shares = [
            f"{name} {percent(openings, group):.1f} %"
            for name, openings in {"What": "What", "Whether": "Whether", "verbs": VERBS}.items()
        ]
        print(f"{group}: {', '.join(shares)}")
    print(f"{'':16}", *(f"{group:>8}" for group in GROUPS), "at most")
    for name, (pattern, ceiling) in PHRASES.items():
        print(f"{name:16}", *(f"{rate(pattern, group):8.2f}" for group in GROUPS), f"{ceiling:.2f}")
