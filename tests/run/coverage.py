#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which lines the tests have reached: coverage.py BUILD SOURCE

BUILD was made with -Db_coverage=true, and tests have run in it, each by counters.sh. Prints a table of files, and writes
BUILD/coverage.txt: the same table, and below it every line that was not reached, by file and function.
Only the rooms that make the product count, not the tests. A source that was compiled several times
counts once: a line is reached if it was in one of the objects.
"""

import collections
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

ROOMS = ("base", "proto", "tiers", "client", "daemon", "tools")


def read_counters(directory, build, source):
    """{file: {line: (count, function)}} of one test program. What a process was just writing when it was killed is lost."""
    counters = sorted(directory.rglob("*.gcda"))
    for gcda in counters:  # gcov looks for what the compiler noted beside it
        notes = gcda.with_suffix(".gcno")
        if not notes.exists():
            notes.symlink_to("/" / notes.relative_to(directory))
    run = subprocess.run(["gcov", "--json-format", "--stdout", *map(str, counters)], cwd=build, capture_output=True)
    for line in run.stderr.decode(errors="replace").splitlines():
        if "not a gcov data file" in line:
            print("lost:", line, file=sys.stderr)
    files = {}
    for document in run.stdout.splitlines():
        for file in json.loads(document)["files"]:
            path = os.path.relpath(os.path.join(build, file["file"]), source)
            if path.split("/")[0] not in ROOMS:
                continue
            lines = files.setdefault(path, {})
            for line in file["lines"]:
                count, function = lines.get(line["line_number"], (0, None))
                lines[line["line_number"]] = (count + line["count"], function or line.get("function_name"))
    return files


def read_all(build, source):
    total = collections.defaultdict(dict)
    programs = sorted(build.glob("counters/*"))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for files in pool.map(lambda program: read_counters(program, build, source), programs):
            for path, lines in files.items():
                for number, (count, function) in lines.items():
                    before, known = total[path].get(number, (0, None))
                    total[path][number] = (before + count, known or function)
    return total


def row(name, lines):
    reached = sum(1 for count, _ in lines if count)
    return f"{name:34} {len(lines):6} {reached:8} {100 * reached / len(lines) if lines else 100:7.1f} %"


def table(total):
    yield f"{'file':34} {'lines':>6} {'reached':>8} {'':>9}"
    for room in ROOMS:
        paths = sorted(path for path in total if path.split("/")[0] == room)
        for path in paths:
            yield row(path, list(total[path].values()))
        yield row(f"-- {room}", [line for path in paths for line in total[path].values()])
    yield row("-- all", [line for lines in total.values() for line in lines.values()])


def unreached(total, source):
    for path in sorted(total):
        missing = [(number, function) for number, (count, function) in sorted(total[path].items()) if not count]
        if not missing:
            continue
        text = (source / path).read_text().splitlines()
        yield f"\n{path}"
        last = None
        for number, function in missing:
            if function != last:
                yield f"  {function or '?'}"
                last = function
            yield f"    {number:5}: {text[number - 1].strip()}"


def main():
    build, source = (pathlib.Path(argument).resolve() for argument in sys.argv[1:3])
    total = read_all(build, source)
    if not total:
        sys.exit(f"{build} has no counters: was it built with -Db_coverage=true, and have tests run?")
    lines = list(table(total))
    print("\n".join(lines))
    report = build / "coverage.txt"
    report.write_text("\n".join([*lines, *unreached(total, source)]) + "\n")
    print(f"\nthe lines that were not reached: {report}")


main()
