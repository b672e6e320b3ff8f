"""Renew the keys of the trainers' newest releases: tests/unit/engines/trainers/fields.json.

    pip download --no-deps transformers trl axolotl llamafactory litgpt torchtune
    python scripts/renew_trainer_names.py *.whl

Wheels are read as text and not executed. The test of the tables asks that each of these keys is of one class.
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "tests/unit/engines/trainers/fields.json"
CLASSES = {
    "transformers": ("transformers", "transformers/", ("TrainingArguments",)),
    "trl": ("trl", "trl/", ("SFTConfig", "ModelConfig", "ScriptArguments")),
    "trl_pairs": ("trl", "trl/", ("DPOConfig", "KTOConfig", "ORPOConfig")),
    "axolotl": ("axolotl", "axolotl/utils/schemas/", ("AxolotlInputConfig",)),
    "llamafactory": (
        "llamafactory", "llamafactory/hparams/",
        ("ModelArguments", "DataArguments", "FinetuningArguments", "GeneratingArguments"),
    ),
}  # fmt: skip
"""Table -> wheel, folder of its classes, classes whose fields are keys; fields of bases are theirs too."""
FUNCTIONS = {
    "litgpt": "litgpt/finetune/full.py",
    "litgpt_lora": "litgpt/finetune/lora.py",
    "litgpt_pretrain": "litgpt/pretrain.py",
}
"""Table -> module of litgpt whose `setup` has the keys as parameters."""
OF_A_SERVER = "trl/scripts/vllm_serve.py"
"""Module whose `ScriptArguments` are not of training."""
RECIPES = ("recipes/full_finetune", "recipes/lora_finetune", "recipes/lora_dpo")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path)
    wheels = {path.name.split("-")[0]: path for path in parser.parse_args().wheels}
    found = {
        table: (wheel, fields([*trees(wheels[wheel], folder)], roots))
        for table, (wheel, folder, roots) in CLASSES.items()
    }
    modules = dict(trees(wheels["litgpt"], "litgpt/"))
    for table, path in FUNCTIONS.items():
        found[table] = ("litgpt", parameters(modules[path], modules["litgpt/args.py"]))
    recipes = [tree for path, tree in trees(wheels["torchtune"], "recipes/") if path.startswith(RECIPES)]
    found["torchtune"] = ("torchtune", {key for tree in recipes for key in settings(tree)})
    content = {
        table: {"release": "-".join(wheels[wheel].name.split("-")[:2]), "keys": sorted(keys)}
        for table, (wheel, keys) in found.items()
    }
    OUT.write_text(f"{json.dumps(content, indent=1)}\n", encoding="utf-8")


def trees(wheel: Path, folder: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of a wheel below `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(folder) and name.endswith(".py") and name != OF_A_SERVER:
                yield name, ast.parse(archive.read(name))


def fields(modules: list[tuple[str, ast.Module]], roots: tuple[str, ...]) -> set[str]:
    """Return the annotated fields of classes and of their bases in the same wheel."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for _, tree in modules:
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    left, found, seen = [*roots], set(), set()
    while left:
        if (name := left.pop()) in seen:
            continue
        seen.add(name)
        for node in classes.get(name, []):
            left += [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            found |= {
                part.target.id
                for part in node.body
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                if not part.target.id.startswith("_") and "ClassVar" not in ast.unparse(part.annotation)
                if "init=False" not in (ast.unparse(part.value) if part.value else "")
            }
    return found


def parameters(module: ast.Module, arguments: ast.Module) -> set[str]:
    """Return the parameters of `setup`, of whose `train` the fields of `TrainArgs` are keys."""
    setup = next(node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "setup")
    names = {one.arg for one in (*setup.args.args, *setup.args.kwonlyargs)} - {"train"}
    return names | {f"train.{name}" for name in fields([("", arguments)], ("TrainArgs",))}


def settings(tree: ast.Module) -> Iterator[str]:
    """Yield what a recipe reads of its configuration: `cfg.NAME`, `cfg.get("NAME")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (path := ast.unparse(node)).startswith("cfg."):
            if not path.endswith(".get"):
                yield path.removeprefix("cfg.")
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "cfg.get"
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


if __name__ == "__main__":
    main()
