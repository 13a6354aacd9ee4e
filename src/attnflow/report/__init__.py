"""Results as pictures: masks in the terminal, as SVG and PNG, and whole analyses as one self-contained HTML file."""

from attnflow.report.build import Report, bias_report, build, geometry_report, mask_report, model_report, trace_report
from attnflow.report.facts import BlockSparsity, CostModel, Growth, block_sparsity, growth
from attnflow.report.figures import mask_figure, mask_png, save_figure
from attnflow.report.html import Html
from attnflow.report.picture import mask_svg
from attnflow.report.registry import figure
from attnflow.report.sections import BIAS_SECTIONS, GEOMETRY_SECTIONS, MODEL_SECTIONS, SECTIONS, TRACE_SECTIONS
from attnflow.report.subject import Section, SectionFunction, Subject
from attnflow.report.terminal import mask_text

__all__ = [
    "BIAS_SECTIONS",
    "GEOMETRY_SECTIONS",
    "MODEL_SECTIONS",
    "SECTIONS",
    "TRACE_SECTIONS",
    "BlockSparsity",
    "CostModel",
    "Growth",
    "Html",
    "Report",
    "Section",
    "SectionFunction",
    "Subject",
    "bias_report",
    "block_sparsity",
    "build",
    "figure",
    "geometry_report",
    "growth",
    "mask_figure",
    "mask_png",
    "mask_report",
    "mask_svg",
    "mask_text",
    "model_report",
    "save_figure",
    "trace_report",
]
