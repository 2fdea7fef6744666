"""Two answers awaited at once: the model takes turns between them, token by token."""

import asyncio

import edgeinfer


async def main() -> None:
    """Ask both, and print them when both are there."""
    with edgeinfer.load("tiny") as model:
        prompts = ("One day, a cat", "One day, a dog")
        answers = await asyncio.gather(
            *(model.generate_async(each, max_tokens=30, seed=1) for each in prompts)
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"{prompt}{answer.text}\n")


asyncio.run(main())
