"""What the papers claim, made runnable: experiments on real models and real text."""
