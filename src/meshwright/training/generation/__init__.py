"""Text from a trained model: prompts in, tokens out one by one.

cache      keys and values of the tokens so far; `CachedModel` feeds a model with it
sampling   logits to the next token
text       tokens to text, piece by piece, and stop strings
decoding   the loop over tokens for a batch of prompts
requests   prompts and conversations to tokens
settings   the caller's sampling settings over the model's
generator  a trained model that answers requests
"""

from meshwright.training.generation.cache import CachedModel
from meshwright.training.generation.decoding import Completed, Prompt, Timing, complete, complete_batch
from meshwright.training.generation.generator import TextGenerator
from meshwright.training.generation.sampling import Sampler
from meshwright.training.generation.text import TextStream
