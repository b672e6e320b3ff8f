"""Text from a trained model: prompts in, tokens out one by one."""

from meshwright.training.generation.cache import CachedModel
from meshwright.training.generation.decoding import Completed, Prompt, Timing, complete, complete_batch
from meshwright.training.generation.generator import TextGenerator
from meshwright.training.generation.sampling import Sampler
from meshwright.training.generation.text import TextStream
