"""Every error and warning that the package can raise, as its user meets it, read from the source.

docs/build.py makes a page of them, so that a search for the text of an error finds it; a test
compares docs/troubleshooting.md with them.
"""

import ast
import builtins
import re
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "grain_shard"
HOLE = "…"  # what an error fills in
WARNING = "Warnings"
OTHERS = "Other errors"

INTERNAL = {"AssertionError", "AttributeError"}  # of whoever works on the package
FEWEST_WORDS = 3  # with less of it fixed, nobody finds a message by its text


def text_of(node):
    """The text of an expression, with holes for what is known only while it runs."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    is_join = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "join"
    if is_join and node.args and isinstance(node.args[0], ast.List):
        return text_of(node.func.value).join(map(text_of, node.args[0].elts))
    return HOLE


def kind_of(call):
    """The class of error that a call makes, or WARNING, or None."""
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if name == "warn":
        return WARNING
    is_builtin = isinstance(getattr(builtins, name, None), type)
    return name if name.endswith("Error") and (is_builtin or name in OURS) else None


OURS = {
    node.name
    for node in ast.parse((PACKAGE / "errors.py").read_text()).body
    if isinstance(node, ast.ClassDef)
} | {"RehearsalError"}


def can_be_found(text):
    """Whether enough of a message is fixed that a search for its words finds it."""
    return len(re.findall(r"[^\W\d]{2,}", text.replace("\n  remedy: ", ""))) >= FEWEST_WORDS


def messages():
    """By class of error, its messages, each with its remedy.

    What is put together elsewhere than where it is raised is known by its remedy.
    """
    found = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        raised = set()
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and node.args and kind_of(node)):
                continue
            raised.update(map(id, ast.walk(node)))
            text = text_of(node.args[0])
            remedies = [text_of(word.value) for word in node.keywords if word.arg == "remedy"]
            if any(map(str.isalpha, text.partition("\n")[0])) and kind_of(node) not in INTERNAL:
                found[kind_of(node)].add("\n  remedy: ".join([text, *remedies]))
        for node in ast.walk(tree):
            whole = isinstance(node, ast.Call | ast.JoinedStr) and id(node) not in raised
            if whole and "  remedy: " in (text := text_of(node)):
                raised.update(map(id, ast.walk(node)))
                found[OTHERS].add(text)
    return {
        kind: sorted(filter(can_be_found, texts), key=str.lower)
        for kind, texts in sorted(found.items())
    }


def page():
    """All messages as a page of the site."""
    parts = [
        "# Every message",
        f"As they are in the source; `{HOLE}` is what an error fills in. Press Ctrl-F, or search,"
        " with a few words of the message that you met. Those that need more than a sentence are in"
        " [Troubleshooting](troubleshooting.md).",
    ]
    for kind, texts in messages().items():
        parts.append(f"## {kind if kind in (WARNING, OTHERS) else f'`{kind}`'}")
        parts += [f"```{{code-block}} text\n:class: message\n\n{text}\n```" for text in texts]
    return "\n\n".join(parts) + "\n"
