"""``lockstep serve``: HTTP in OpenAI's form, in a process that holds neither model nor tokenizer."""
