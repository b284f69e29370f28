# SPDX-License-Identifier: Apache-2.0
import unittest

import paths
from ckptd import names


class Names(unittest.TestCase):
    def test_examples(self):
        for key, text in (
            ("layer1.0.weight", "layer1.0.weight"), ("a/b", "a%2Fb"), ("a%b", "a%25b"), ("", "%_"), ("\n", "%0A"),
            ("\ud800", "%uD800"), (3, "%i3"), (-3, "%i-3"), ("3", "3"), (None, "%jnull"), (True, "%jtrue"),
            ((1, "/"), '%j{"$":"tuple","v":[1,"%2F"]}'), ("é", "é"),
        ):
            self.assertEqual(names.segment(key), text)

    def test_nested_and_dotted_keys_differ(self):
        self.assertNotEqual(names.join(names.join("m", "a"), "b"), names.join("m", "a.b"))
        self.assertNotEqual(names.join(names.join("m", "a"), "b"), names.join("m", "a/b"))

    def test_escape_is_reversible_and_encodable(self):
        chance = paths.seeded("test_escape_is_reversible_and_encodable")
        alphabet = ["%", "/", "_", "2", "5", "F", "u", "i", "j", "\0", "\n", "\x7f", "é", "\ud800", "\udfff", "a", "."]
        seen = {}
        for _ in range(20000):
            key = "".join(chance.choice(alphabet) for _ in range(chance.randrange(6)))
            text = names.escape(key)
            text.encode("utf-8")
            self.assertNotIn("/", text)
            self.assertNotIn("\0", text)
            self.assertEqual(names.unescape(text), key)
            self.assertEqual(seen.setdefault(text, key), key)

    def test_paths_never_collide(self):
        chance = paths.seeded("test_paths_never_collide")
        atoms = ["a", "b", "a.b", "a/b", "%", "%i1", "%_", "", "1", 1, -1, True, None, 1.0, (1,), ("a", "b"), "%jtrue"]
        seen = {}
        for _ in range(20000):
            path = tuple(chance.choice(atoms) for _ in range(chance.randrange(1, 4)))
            name = names.segment(path[0])
            for key in path[1:]:
                name = names.join(name, key)
            kinds = tuple((type(key), key) for key in path)
            self.assertEqual(seen.setdefault(name, kinds), kinds)

    def test_reserved_words_are_nobodys_key(self):
        self.assertEqual(names.segment(names.reserved("group0")), "%group0")
        self.assertNotEqual(names.segment("%group0"), "%group0")


if __name__ == "__main__":
    unittest.main()
