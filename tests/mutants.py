"""Changes of the library's source that name a function and an expression of it, not a file's lines.

A change is found in the syntax tree, so comments and formatting may change, and functions may move inside their module.
"""

import ast
from pathlib import Path

import nearfield

PACKAGE = Path(nearfield.__file__).parent


def changed(module: str, function: str, old: str, new: str) -> str:
    """The source of a module (a path in the package) in which one expression or statement of a function is replaced.

    Args:
        function: its name in the module, as `Plan.transpose`.
        old: stands in the function exactly once.
        new: any number of statements in place of a statement.
    """
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    replacing = _Replacing(ast.unparse(ast.parse(old)), ast.parse(new).body)
    replacing.visit(_function(tree, module, function))
    assert replacing.times == 1, (
        f"{module} has {old!r} {replacing.times} times in {function}; write this mutant anew"
    )
    return ast.unparse(ast.fix_missing_locations(tree))


def _function(tree: ast.Module, module: str, function: str) -> ast.AST:
    node: ast.AST = tree
    for name in function.split("."):
        found = [
            each
            for each in getattr(node, "body", [])
            if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each.name == name
        ]
        assert len(found) == 1, f"{module} has no {function}; write this mutant anew"
        node = found[0]
    return node


class _Replacing(ast.NodeTransformer):
    def __init__(self, old: str, new: list[ast.stmt]) -> None:
        self.old, self.new, self.times = old, new, 0

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:  # type: ignore[override]
        if isinstance(node, (ast.expr, ast.stmt)) and ast.unparse(node) == self.old:
            self.times += 1
            if isinstance(node, ast.stmt):
                return self.new
            (statement,) = self.new
            assert isinstance(statement, ast.Expr)
            return statement.value
        found: ast.AST = self.generic_visit(node)
        return found
