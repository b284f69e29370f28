#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what `ckptctl trace` wrote, for pages that cannot show it in a viewer.

usage: trace-picture.py run.json [--from SECONDS] [--to SECONDS] > run.svg

One row per thread of the trace, in the order of its sort indices; spans are boxes that carry their step,
moments are marks, the pool's use is drawn below. Nothing is left out and nothing smoothed.
"""

import argparse
import html
import json
import sys

WIDTH, LEFT, RIGHT, ROW, GAP, POOL = 1180, 150, 20, 22, 26, 70
COLOURS = {"capture": "#4c78a8", "wait for room": "#e8b04a", "stall": "#e8b04a", "drain": "#72b7a1", "commit": "#2f7d64",
           "restore": "#9a79b8"}
MARKS = {"complete": "#2f7d64", "skipped": "#c8403a", "superseded": "#8a8a8a", "stuck": "#c8403a"}
FAILED, INK, FAINT = "#c8403a", "#222222", "#dddddd"


def text(x, y, words, size=11, anchor="start", fill=INK, weight="normal", halo=False):
    around = ' stroke="white" stroke-width="2.5" paint-order="stroke"' if halo else ""
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
            f'font-weight="{weight}"{around}>{html.escape(words)}</text>')


def tick_length(seconds):
    """1, 2 or 5 of some power of ten, so that there are not more than twelve."""
    power = 1e-6
    while True:
        for factor in (1, 2, 5):
            if seconds <= 12 * factor * power:
                return factor * power
        power *= 10


class Picture:
    def __init__(self, events, begin, end):
        self.begin, self.end, self.out = begin, end, []
        self.names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
        self.places = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.events = [e for e in events if e["ph"] in "Xi" and e["ts"] < end and e["ts"] + e.get("dur", 0) >= begin]
        self.pool = [e for e in events if e["ph"] == "C"]

    def x(self, us):
        us = min(max(us, self.begin), self.end)
        return LEFT + (us - self.begin) / (self.end - self.begin) * (WIDTH - LEFT - RIGHT)

    def span(self, event, y):
        left, right = self.x(event["ts"]), self.x(event["ts"] + event["dur"])
        failed = event["name"].endswith("failed")
        colour = FAILED if failed else COLOURS[event["cat"]]
        width = max(right - left, 0.8)
        words = f'{event["name"]}: {event["dur"] / 1000:.3g} ms'
        self.out.append(f'<rect x="{left:.1f}" y="{y + 2}" width="{width:.1f}" height="{ROW - 4}" fill="{colour}" '
                        f'stroke="white" stroke-width="0.5"><title>{html.escape(words)}</title></rect>')
        label = str(event["args"]["step"])
        if width > 7 * len(label) + 4:
            self.out.append(text((left + right) / 2, y + ROW / 2 + 4, label, 11, "middle", "white"))

    def moment(self, event, y):
        x = self.x(event["ts"])
        colour = MARKS[event["cat"]]
        self.out.append(f'<path d="M{x:.1f} {y + 4} l5 7 l-5 7 l-5 -7 z" fill="{colour}" stroke="white" stroke-width="0.7">'
                        f'<title>{html.escape(event["name"])}</title></path>')
        self.out.append(text(x + 6, y + ROW / 2 + 4, str(event["args"]["step"]), 9, halo=True))

    def rows(self, y):
        for pid in sorted(self.places):
            threads = sorted((key for key in self.names if key[0] == pid), key=lambda key: (self.order[key], key))
            self.out.append(text(8, y + 14, self.places[pid], 12, weight="bold"))
            y += 20
            for key in threads:
                self.out.append(text(LEFT - 8, y + ROW / 2 + 4, self.names[key], 11, "end"))
                self.out.append(f'<line x1="{LEFT}" y1="{y + ROW}" x2="{WIDTH - RIGHT}" y2="{y + ROW}" stroke="{FAINT}"/>')
                mine = [e for e in self.events if (e["pid"], e["tid"]) == key]
                for event in mine:
                    if event["ph"] == "X":
                        self.span(event, y)
                for event in mine:
                    if event["ph"] == "i":
                        self.moment(event, y)
                y += ROW
            y += GAP - 20
        return y

    def use(self, y):
        """Bytes of the pool: in use, and on top what is only cached. Known at each event."""
        most = max((sum(e["args"].values()) for e in self.pool), default=0) or 1
        self.out.append(text(8, y + 14, "pool", 12, weight="bold"))
        self.out.append(text(LEFT - 8, y + 14, f"{most / (1 << 20):.0f} MiB", 10, "end"))
        for keys, colour in ((("in use", "cached"), "#c9d7e6"), (("in use",), "#4c78a8")):
            points, level = [f"{LEFT},{y + POOL}"], 0
            for event in self.pool:
                value = sum(event["args"][key] for key in keys)
                x = self.x(event["ts"])
                points += [f"{x:.1f},{y + POOL - level:.1f}", f"{x:.1f},{y + POOL - POOL * value / most:.1f}"]
                level = POOL * value / most
            points += [f"{WIDTH - RIGHT},{y + POOL - level:.1f}", f"{WIDTH - RIGHT},{y + POOL}"]
            self.out.append(f'<polygon points="{" ".join(points)}" fill="{colour}"/>')
        return y + POOL + 8

    def axis(self, y, top):
        length = tick_length((self.end - self.begin) / 1e6)
        number = 0
        while number * length * 1e6 <= self.end - self.begin:
            x = self.x(self.begin + number * length * 1e6)
            self.out.insert(0, f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{y}" stroke="{FAINT}"/>')
            self.out.append(text(x, y + 14, f"{number * length:.4g} s", 10, "middle"))
            number += 1
        return y + 24

    def legend(self, y):
        x = LEFT
        kinds = {e["cat"] for e in self.events}
        for name, colour in {**COLOURS, **MARKS}.items():
            if name in kinds:
                self.out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
                self.out.append(text(x + 16, y + 10, name))
                x += 34 + 7 * len(name)
        for name, colour in (("in use", "#4c78a8"), ("cached", "#c9d7e6")):
            self.out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
            self.out.append(text(x + 16, y + 10, "pool " + name))
            x += 62 + 7 * len(name)
        return y + 22

    def draw(self):
        y = self.use(self.rows(10))
        y = self.legend(self.axis(y, 10))
        return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" '
                          'font-family="sans-serif">', f'<rect width="{WIDTH}" height="{y}" fill="white"/>', *self.out,
                          "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--from", dest="begin", type=float, default=0.0)
    parser.add_argument("--to", dest="end", type=float)
    args = parser.parse_args()
    with open(args.trace, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    last = max((e["ts"] + e.get("dur", 0) for e in events if e["ph"] in "Xi"), default=1.0)
    end = last if args.end is None else args.end * 1e6
    sys.stdout.write(Picture(events, args.begin * 1e6, end).draw())


if __name__ == "__main__":
    main()
