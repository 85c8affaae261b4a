"""Rewrites Bazel's class path file for a prefix: relocate_jars.py ROOT.

Debian's jars name their dependencies by absolute path or by sibling name in the manifest's Class-Path, and Bazel's
class path file names the first of them by absolute path. Under a prefix the absolute ones resolve to nothing, so the
file gets the whole closure instead.
"""

import os
import sys
import zipfile


def manifest_class_path(jar: str) -> list[str]:
    """Entries of the jar's Class-Path header; manifests wrap long lines with a newline and one blank."""
    with zipfile.ZipFile(jar) as archive:
        if "META-INF/MANIFEST.MF" not in archive.namelist():
            return []
        text = archive.read("META-INF/MANIFEST.MF").decode().replace("\r\n", "\n").replace("\n ", "")
    return [entry for line in text.split("\n") if line.startswith("Class-Path:") for entry in line[11:].split()]


def main(root: str) -> None:
    path = os.path.join(root, "usr/share/bazel/bazel_classpath_debian_depends.txt")
    with open(path) as file:
        pending = [root + line.strip() for line in file if line.strip()]
    closure: dict[str, None] = {}  # ordered: the first of two jars with the same class wins
    while pending:
        jar = pending.pop(0)
        if jar in closure or not os.path.exists(jar):
            continue
        closure[jar] = None
        for entry in manifest_class_path(jar):
            pending.append(root + entry if entry.startswith("/") else os.path.join(os.path.dirname(jar), entry))
    with open(path, "w") as file:
        file.write("\n".join(closure) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
