"""TRL's trainer for supervised fine-tuning, on transformers, accelerate and PEFT: its runs are planned and exported."""

VERSION = "1.16"
