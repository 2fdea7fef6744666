"""An answer that a program can read: it keeps to a JSON schema. Wants `pip install edgeinfer[structured]`."""

import json

import edgeinfer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "animal": {"enum": ["fox", "bear", "owl"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "animal", "age"],
    "additionalProperties": False,
}

with edgeinfer.load("tiny") as model:
    answer = model.generate("The hero of my story, as JSON: ", schema=SCHEMA, seed=5)
    hero = json.loads(answer.text)
    print(f"{hero['name'].strip()} the {hero['animal']}, {hero['age']} years old")
