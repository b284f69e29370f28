#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds up the logs of a test run: summary.py DIRECTORY

The directory has one STAGE.json per stage: the lines of meson's testlog.json, one per test program.
What is counted is the *case*: one cmocka test, one unittest method, or, for a program of any other
kind, the program. A program that failed without a failing case (it crashed, or ran out of time)
counts as one more failed case. So the same case in two stages counts twice.

The last line is "N passed, N failed", with ", N skipped" if there were any. Exit 1 if something
failed, or if nothing ran.
"""

import json
import pathlib
import re
import sys
from dataclasses import dataclass, field

CMOCKA_CASE = re.compile(r"^\[ +(OK|FAILED|SKIPPED|ERROR) +\] (?!\d+ test\(s\))(\w.*?)$", re.MULTILINE)
UNITTEST_RAN = re.compile(r"^Ran (\d+) tests? in ", re.MULTILINE)
UNITTEST_END = re.compile(r"^(?:OK|FAILED)(?: \((.*)\))?$", re.MULTILINE)
UNITTEST_SKIP = re.compile(r"^(\w+) \([^)\n]*\)(?:\n[^\n]*)? \.\.\. skipped ['\"](.*)['\"]$", re.MULTILINE)


@dataclass
class Count:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: list = field(default_factory=list)
    skips: list = field(default_factory=list)

    def add(self, other):
        for name in ("passed", "failed", "skipped", "failures", "skips"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self):
        text = f"{self.passed} passed, {self.failed} failed"
        return text + (f", {self.skipped} skipped" if self.skipped else "")


def last_line(text):
    """What a program said last, or what a sanitizer sums it up as."""
    summary = re.search(r"^SUMMARY: .*$", text, re.MULTILINE)
    if summary:
        return summary.group()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def count_cmocka(name, text):
    by_result = {"OK": 0, "FAILED": set(), "SKIPPED": set(), "ERROR": set()}
    for result, case in CMOCKA_CASE.findall(text):
        if result == "OK":
            by_result["OK"] += 1
        else:
            by_result[result].add(case)
    failed = by_result["FAILED"] | by_result["ERROR"]
    return Count(
        by_result["OK"],
        len(failed),
        len(by_result["SKIPPED"]),
        [f"{name}: {case}" for case in sorted(failed)],
        [f"{name}: {case}: {cmocka_reason(text, case)}" for case in sorted(by_result["SKIPPED"])],
    )


def cmocka_reason(text, case):
    """What the case printed before it was skipped."""
    before, found, after = text.partition(f"[ RUN      ] {case}\n")
    said = after.partition(f"[  SKIPPED ] {case}")[0] if found else ""
    return last_line(said)


def count_unittest(name, text):
    count = Count()
    ran = sum(int(number) for number in UNITTEST_RAN.findall(text))
    for details in UNITTEST_END.findall(text):
        numbers = dict(re.findall(r"([a-z ]+)=(\d+)", details))
        numbers = {key.strip(): int(value) for key, value in numbers.items()}
        count.failed += numbers.get("failures", 0) + numbers.get("errors", 0) + numbers.get("unexpected successes", 0)
        count.skipped += numbers.get("skipped", 0)
    count.passed = max(ran - count.failed - count.skipped, 0)
    count.failures = [f"{name}: {case}" for case in re.findall(r"^(?:FAIL|ERROR): (.*)$", text, re.MULTILINE)]
    count.skips = [f"{name}: {case}: {reason}" for case, reason in UNITTEST_SKIP.findall(text)]
    if count.skipped and not count.skips:
        count.skips.append(f"{name}: {count.skipped} cases")
    return count


def count_program(entry):
    name, result = entry["name"], entry["result"]
    text = entry.get("stdout", "") + "\n" + entry.get("stderr", "")
    if UNITTEST_RAN.search(text):
        count = count_unittest(name, text)
    elif CMOCKA_CASE.search(text):
        count = count_cmocka(name, text)
    else:
        count = Count()

    if result in ("OK", "EXPECTEDFAIL"):
        if not (count.passed or count.failed or count.skipped):
            count.passed = 1
    elif result == "SKIP":
        if not count.skipped:
            count.skipped = 1
            count.skips.append(f"{name}: {last_line(text)}")
    elif not count.failed:
        count.failed = 1
        count.failures.append(f"{name}: {result.lower()}: {last_line(text)}")
    return count


def main():
    total = Count()
    for log in sorted(pathlib.Path(sys.argv[1]).glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        stage = Count()
        for line in log.read_text().splitlines():
            stage.add(count_program(json.loads(line)))
        print(f"{log.stem + ':':12} {stage}")
        for skip in stage.skips:
            print(f"    skipped  {skip}")
        for failure in stage.failures:
            print(f"    FAILED   {failure}")
        total.add(stage)
    print()
    print(total)
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main())
