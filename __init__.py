"""ComfyUI-SpeedTier: the host's entry. Outside ComfyUI this file does nothing."""

try:
    import comfy.model_patcher  # noqa: F401  (the host: without it there is nothing to register)
except ImportError:
    pass
else:
    from server import PromptServer

    from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, routes

    WEB_DIRECTORY = "./web"
    if getattr(PromptServer, "instance", None) is not None:
        routes.register(PromptServer.instance)

    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]
