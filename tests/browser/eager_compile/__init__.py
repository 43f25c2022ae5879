"""A pack for the host under test: regional compile through Dynamo alone, without Inductor.

The page is told the same, of real compiles; generating and building the code would only be a minute
of waiting, and has tests of its own in tests/host.
"""

import dataclasses
import sys

from server import PromptServer

NODE_CLASS_MAPPINGS: dict = {}


def use_eager_backend(json_data: dict) -> dict:
    for name, module in list(sys.modules.items()):
        if name.endswith(".speed.apply"):
            module.OPTIMIZATIONS = tuple(map(eager, module.OPTIMIZATIONS))
    return json_data


def eager(row):
    if row.name != "regional_compile":
        return row
    return dataclasses.replace(row, config=dataclasses.replace(row.config, backend="eager"))


PromptServer.instance.add_on_prompt_handler(use_eager_backend)
