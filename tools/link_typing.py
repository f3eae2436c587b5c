"""Rebuilds `.typing/`, a git-ignored farm of links where mypy and pyright see the folders as `twinfer`. Not used at run time."""

import shutil
import tomllib
from pathlib import Path


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    folders = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    farm = root / ".typing"
    shutil.rmtree(farm, ignore_errors=True)
    package = farm / "twinfer"
    package.mkdir(parents=True)
    for file in (root / folders["twinfer"]).iterdir():
        if file.suffix in (".py", ".typed"):
            (package / file.name).symlink_to(file)
    for name, folder in folders.items():
        if name.count(".") == 1:
            (package / name.split(".")[1]).symlink_to(root / folder)


if __name__ == "__main__":
    main()
