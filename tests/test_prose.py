"""English of docstrings and comments: openings of docstrings, and phrases that peers avoid.

A phrase is counted per 1,000 words. The ceilings are about twice the worst of eight peers (FSDP2, Inductor's passes,
torchtitan, Thunder, xDSL, ir-py, Equinox, AutoParallel). `python -m tests.test_prose` prints the rates.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize

import pytest

from tests.layers import modules, tree

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


@functools.cache
def texts() -> tuple[list[str], list[str]]:
    """Return all docstrings and comments, and the docstrings of functions."""
    every: list[str] = []
    functions: list[str] = []
    for path in modules().values():
        source = path.read_text()
        for node in ast.walk(tree(path)):
            documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            if documented and (doc := ast.get_docstring(node)):
                every.append(doc)
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    functions.append(doc)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        every += [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return every, functions


def rate(pattern: str) -> float:
    """Return how often a pattern occurs per 1,000 words."""
    text = "\n".join(texts()[0])
    return 1000 * len(re.findall(pattern, text, re.IGNORECASE)) / len(re.findall(r"[A-Za-z']+", text))


def percent(openings: str) -> float:
    """Return the percentage of functions' docstrings that open with one of the words, separated by "|"."""
    found = texts()[1]
    return 100 * sum(re.match(rf"({openings})\b", doc) is not None for doc in found) / len(found)


@pytest.mark.parametrize("name", PHRASES)
def test_phrases(name: str) -> None:
    pattern, ceiling = PHRASES[name]
    assert rate(pattern) <= ceiling


def test_openings() -> None:
    assert percent("What") <= WHAT
    assert percent("Whether") <= WHETHER
    assert percent(VERBS) >= IMPERATIVE


if __name__ == "__main__":
    print(f"What {percent('What'):.1f} %, Whether {percent('Whether'):.1f} %, verbs {percent(VERBS):.1f} %")
    for name, (pattern, ceiling) in PHRASES.items():
        print(f"{name:16} {rate(pattern):.2f} of at most {ceiling}")
