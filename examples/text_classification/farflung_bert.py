# SPDX-License-Identifier: Apache-2.0
"""Tell good hotel reviews from bad ones with BERT: the work of `raw_ddp_bert.py`, with an `Accelerator`.

Run it with `python farflung_bert.py`, `farflung launch --cpu --num_processes 2 farflung_bert.py` or
`torchrun --nproc_per_node 2 farflung_bert.py`. Mixed precision can be asked for in three ways, the first that speaks
wins:

    farflung_bert.py --mixed_precision bf16                    the argument of `Accelerator`
    farflung launch --mixed_precision bf16 farflung_bert.py     the launcher's flag
    farflung launch --config_file bf16.yaml farflung_bert.py    a file with the line `mixed_precision: bf16`
"""

import torch
from reviews import arguments, collator, load_bert, read_reviews, split
from torch.utils.data import DataLoader

from farflung import Accelerator, DataLoaderConfiguration
from farflung.utils import set_seed


def main():
    args = arguments(__doc__)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,  # None: as the launcher says
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    set_seed(args.seed)

    reviews, dropped = read_reviews(args.data)
    accelerator.print(f"{len(reviews)} reviews, {dropped} rows with missing values dropped")
    accelerator.print(f"mixed precision: {accelerator.mixed_precision}")
    training_set, validation_set = split(reviews, args.seed, args.batch_size * accelerator.num_processes)
    tokenizer, model = load_bert(args.model, reviews)
    collate = collator(tokenizer, args.max_length)
    training = DataLoader(training_set, args.batch_size, shuffle=True, collate_fn=collate, drop_last=True)
    validation = DataLoader(validation_set, args.batch_size, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, training, validation = accelerator.prepare(model, optimizer, training, validation)

    num_steps = 0
    for epoch in range(args.epochs):
        model.train()
        for batch in training:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    num_steps += 1
                optimizer.step()
                optimizer.zero_grad()
        mean_loss = accelerator.reduce(loss.detach(), "mean")

        model.eval()
        right = 0
        for batch in validation:
            with torch.no_grad():
                guesses = model(**batch).logits.argmax(dim=-1)
            guesses, labels = accelerator.gather_for_metrics((guesses, batch["labels"]))
            right += (guesses == labels).sum().item()
        accuracy = right / len(validation_set)
        accelerator.print(f"epoch {epoch}: loss {mean_loss.item():.4f}, accuracy {accuracy:.4f}", flush=True)
    accelerator.print(f"{num_steps} optimizer steps")


if __name__ == "__main__":
    main()
