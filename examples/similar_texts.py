"""Texts as vectors: which of them are about the same?"""

import edgeinfer

TEXTS = ["The fox ran into the wood.", "A fox was running through a forest.", "We ate cake at the party."]

with edgeinfer.load("tiny") as model:
    vectors = model.embed(TEXTS)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        print(f"{vectors[i] @ vectors[j]:.3f}  {TEXTS[i]}  |  {TEXTS[j]}")
