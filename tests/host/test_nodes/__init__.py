"""Test-only nodes: tiny real models, disturbances, and readings the pack has no hand in."""

from . import disturb, models, observe, routes  # noqa: F401  (routes registers on import)

NODE_CLASS_MAPPINGS = {
    node.__name__: node for node in (*models.NODES, *disturb.NODES, *observe.NODES)
}
