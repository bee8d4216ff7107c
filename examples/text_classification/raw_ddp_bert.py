# SPDX-License-Identifier: Apache-2.0
"""Tell good hotel reviews from bad ones with BERT: torch's own DDP, with all that it leaves to you.

Run it with `torchrun --nproc_per_node 2 raw_ddp_bert.py`, or alone with `torchrun --nproc_per_node 1 raw_ddp_bert.py`,
and lay `farflung_bert.py` beside it. (`--mixed_precision fp16` needs the scaler that only the other one brings along.)
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from reviews import arguments, collator, load_bert, read_reviews, split
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main():
    args = arguments(__doc__)
    if args.mixed_precision == "fp16":
        raise SystemExit("raw_ddp_bert.py has no gradient scaler, which fp16 needs; use bf16, or farflung_bert.py.")
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(args, on_gpu)  # a function of its own: the DDP model must be gone before its process group goes
    dist.destroy_process_group()


def train(args, on_gpu):
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(args.seed)

    reviews, dropped = read_reviews(args.data)
    if rank == 0:
        print(f"{len(reviews)} reviews, {dropped} rows with missing values dropped")
    training_set, validation_set = split(reviews, args.seed, args.batch_size * size)
    tokenizer, model = load_bert(args.model, reviews)
    collate = collator(tokenizer, args.max_length)
    sampler = DistributedSampler(training_set, shuffle=True, seed=args.seed, drop_last=True)
    training = DataLoader(training_set, args.batch_size, sampler=sampler, collate_fn=collate, drop_last=True)
    validation_sampler = DistributedSampler(validation_set, shuffle=False)
    validation = DataLoader(validation_set, args.batch_size, sampler=validation_sampler, collate_fn=collate)
    model = DistributedDataParallel(model.to(device), device_ids=[device.index] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    precision = torch.autocast(device.type, torch.bfloat16, enabled=args.mixed_precision == "bf16")

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for index, batch in enumerate(training):
            batch = {name: value.to(device) for name, value in batch.items()}
            first = index - index % args.gradient_accumulation_steps  # of the window; the last one may be short
            window = min(args.gradient_accumulation_steps, len(training) - first)
            step_due = index + 1 == first + window
            with nullcontext() if step_due else model.no_sync():
                with precision:
                    loss = model(**batch).loss
                (loss / window).backward()
            if step_due:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        mean_loss /= size

        model.eval()
        # The sampler gives every process equally many samples by repeating the first ones: of those that this process
        # is given, only so many are not repetitions.
        own = len(range(rank, len(validation_set), size))
        right = torch.zeros(1, device=device)
        for batch in validation:
            batch = {name: value.to(device) for name, value in batch.items()}
            with torch.no_grad(), precision:
                guesses = model(**batch).logits.argmax(dim=-1)
            hits = guesses == batch["labels"]
            right += hits[:own].sum()
            own = max(0, own - len(hits))
        dist.all_reduce(right)
        if rank == 0:
            accuracy = right.item() / len(validation_set)
            print(f"epoch {epoch}: loss {mean_loss.item():.4f}, accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
