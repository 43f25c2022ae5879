"""Exception classes of the engine: a message names the subject, what was found, what to do."""


class SpeedTierError(RuntimeError):
    """Base of every error the engine raises on purpose."""


class UnsupportedModelError(SpeedTierError):
    """The model is none that the engine knows, or a variant it cannot run."""


class PatchDriftError(SpeedTierError):
    """A patch target no longer has the body or signature the patch was written for."""


class KernelConstraintError(SpeedTierError):
    """A kernel cannot take these tensors, or cannot run on this device."""


class GGUFFileError(SpeedTierError):
    """A GGUF file is damaged, incomplete, of a kind that cannot be used, or not GGUF at all."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch, cuBLAS or the driver says that device memory ran out."""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in said.lower() or "CUBLAS_STATUS_ALLOC_FAILED" in said
    )


class NotFiniteError(SpeedTierError):
    """A tiered step gave NaN or infinity: the sampler is to begin again. Never seen by users."""
