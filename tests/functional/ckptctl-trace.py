# SPDX-License-Identifier: Apache-2.0
"""Checks the trace of a job that saved some steps, all of them drained everywhere.

usage: ckptctl-trace.py FILE JOB STEPS TIER..."""
import json
import sys

path, job, steps, *tiers = sys.argv[1:]
with open(path, encoding="utf-8") as file:
    events = json.load(file)["traceEvents"]

places = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
assert set(places.values()) == {"memory", *(f"tier {tier}" for tier in tiers)}, places
assert len(places) == len(set(places.values()))
for event in events:
    if event["ph"] in "Xi":
        assert threads[event["pid"], event["tid"]].startswith(job), event
        assert event["ts"] >= 0 and event.get("dur", 0) >= 0, event


def the(phase, place, word, step):
    """The one event; both its ends."""
    found = [event for event in events if event["ph"] == phase and places[event["pid"]] == place
             and event["cat"] == word and event["args"]["step"] == step]
    assert len(found) == 1, (place, word, step, found)
    return found[0]["ts"], found[0]["ts"] + found[0].get("dur", 0)


apart = 1e-3 + 1e-6  # us: times have three decimals
for step in range(1, int(steps) + 1):
    captured = the("X", "memory", "capture", step)
    for tier in tiers:
        place = f"tier {tier}"
        drained, committed = the("X", place, "drain", step), the("X", place, "commit", step)
        complete = the("i", place, "complete", step)
        # Draining begins with the first captured chunk, and ends after the last.
        assert captured[0] <= drained[0] + apart and captured[1] <= drained[1] + apart, (step, tier)
        assert drained[1] <= committed[0] + apart and committed[1] <= complete[0] + apart, (step, tier)

pool = [event for event in events if event["ph"] == "C"]
assert pool and all(value >= 0 for event in pool for value in event["args"].values())
assert [event["ts"] for event in pool] == sorted(event["ts"] for event in pool)
