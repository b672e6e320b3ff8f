"""A model of transformers and PEFT under its Trainer, with everything but training turned off.

Started by `train_cpu`.
"""

from __future__ import annotations

import torch
from peft import PeftModel
from task import Steps, Task, read_task
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging


class Sequences(torch.utils.data.Dataset):
    """Sequences in the order of the steps, in memory. `shift_labels` are already shifted labels."""

    def __init__(self, task: Task) -> None:
        self.tokens, self.labels = (x.flatten(0, 1) for x in task.batches())

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.labels[i], "shift_labels": self.labels[i]}


class Sequential(Trainer):
    """The Trainer, reading in order, and keeping the loss of a step."""

    step_loss = 0.0

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(train_dataset or self.train_dataset)

    def training_step(self, *arguments, **named):
        loss = super().training_step(*arguments, **named)
        self.step_loss += float(loss)
        return loss


class Line(TrainerCallback):
    def __init__(self, task: Task) -> None:
        self.task = task

    def on_train_begin(self, args, state, control, **named) -> None:
        self.steps = Steps(self.task)

    def on_step_end(self, args, state, control, **named) -> None:
        self.steps.write(self.trainer.step_loss)
        self.trainer.step_loss = 0.0


def train(task: Task) -> None:
    logging.set_verbosity_error()
    arguments = TrainingArguments(
        output_dir=str(task.out),
        use_cpu=True,
        bf16=task.precision == "bf16",
        per_device_train_batch_size=task.micro,
        gradient_accumulation_steps=task.num_micro_batches,
        max_steps=task.steps,
        optim="adamw_torch_fused",
        learning_rate=task.learning_rate,
        adam_beta1=task.betas[0],
        adam_beta2=task.betas[1],
        adam_epsilon=task.epsilon,
        weight_decay=0.0,
        max_grad_norm=task.clip,
        lr_scheduler_type="constant",
        torch_compile=task.compile,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=0,
    )
    # Trained weights are fp32 under autocast; frozen ones have the format that they compute in, as recipes load them.
    is_frozen = task.adapter.exists()
    dtype = torch.bfloat16 if is_frozen and task.precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(task.weights, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    if is_frozen:
        model = PeftModel.from_pretrained(model, task.adapter, is_trainable=True)
    line = Line(task)
    trainer = Sequential(model=model, args=arguments, train_dataset=Sequences(task), callbacks=[line])
    line.trainer = trainer
    torch.set_num_threads(task.threads)
    trainer.train()


if __name__ == "__main__":
    train(read_task())
