"""The process of a model as a page knows it, with a fault in the model: an MLP that reads the token after its own."""

import sys

from attnflow.report.live import model
from attnflow.studio import worker


def leaky(*arguments, **options):
    loaded = load(*arguments, **options)
    loaded.model.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out + out.roll(-1, dims=1))
    return loaded


if __name__ == "__main__":
    load, model.load_model = model.load_model, leaky
    worker.main(sys.argv[1], int(sys.argv[2]))
