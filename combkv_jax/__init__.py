"""Long-context inference in JAX: a Llama whose history is compressed into a few layers' K/V.

`import combkv_jax as ck; model = ck.load(DIR); history = model.compress(text)`, then
`for piece in model.generate(prompt, history): ...`.
"""

from combkv_jax.cache import History
from combkv_jax.chat import ChatSession
from combkv_jax.config import CombConfig, LlamaConfig
from combkv_jax.errors import RequestError
from combkv_jax.generate import Sampling
from combkv_jax.language_model import LanguageModel, load

__version__ = "0.1.0"
__all__ = [
    "ChatSession",
    "CombConfig",
    "History",
    "LanguageModel",
    "LlamaConfig",
    "RequestError",
    "Sampling",
    "load",
]
