"""twostroke: an LLM serving engine whose two strokes are prefill and decode.

The names below are loaded on first use, so that `import twostroke` costs nothing and the
command line answers at once.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.client.llm import LLM
    from twostroke.messages import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "LLM":
        from twostroke.client.llm import LLM

        return LLM
    if name == "SamplingParams":
        from twostroke.messages import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'twostroke' has no attribute {name!r}")
