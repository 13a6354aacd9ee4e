"""The sections of a report, one function each: `Subject` in, `Section` out, None where there is nothing to say."""

from attnflow.report.sections.bias import bias_graph, bias_layers, bias_maps, bias_weights
from attnflow.report.sections.findings import audit, idle, leaks, verification
from attnflow.report.sections.geometry import by_head, by_layer, scores
from attnflow.report.sections.knowledge import trace_entries, trace_layers, trace_maps
from attnflow.report.sections.mask import blocks, cost, picture
from attnflow.report.sections.order import growth_by_layer, order
from attnflow.report.subject import SectionFunction

SECTIONS: tuple[SectionFunction, ...] = (
    picture,
    order,
    growth_by_layer,
    leaks,
    idle,
    verification,
    audit,
    blocks,
    cost,
)
BIAS_SECTIONS: tuple[SectionFunction, ...] = (bias_layers, bias_maps, bias_weights, bias_graph)
MODEL_SECTIONS: tuple[SectionFunction, ...] = (
    audit,
    *(function for function in SECTIONS if function is not audit),
    *BIAS_SECTIONS,
)
TRACE_SECTIONS: tuple[SectionFunction, ...] = (trace_entries, trace_maps, trace_layers)
GEOMETRY_SECTIONS: tuple[SectionFunction, ...] = (scores, by_layer, by_head)

__all__ = [
    "BIAS_SECTIONS",
    "GEOMETRY_SECTIONS",
    "MODEL_SECTIONS",
    "SECTIONS",
    "TRACE_SECTIONS",
    "audit",
    "bias_graph",
    "bias_layers",
    "bias_maps",
    "bias_weights",
    "blocks",
    "by_head",
    "by_layer",
    "cost",
    "growth_by_layer",
    "idle",
    "leaks",
    "order",
    "picture",
    "scores",
    "trace_entries",
    "trace_layers",
    "trace_maps",
    "verification",
]
