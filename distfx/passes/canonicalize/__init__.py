"""canonicalize: one operator for each concept. All convolutions are ``convolution``, all views ``reshape``, and so on.

:data:`REWRITES` maps each operator that has a canonical form to a function that rewrites its call in place. A function
does nothing if a call has no canonical form.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, Node

from distfx.ir.meta import Meta, meta
from distfx.ir.nodes import aten
from distfx.ir.torch_private import rename
from distfx.passes.canonicalize import arithmetic, outputs, products, shapes
from distfx.passes.canonicalize.batch import add_batch_dim
from distfx.passes.canonicalize.calls import Rewrite, duplicate_operands
from distfx.passes.losses import LOSSES
from distfx.rules.registry import has_operand_roles

__all__ = ["REWRITES", "canonicalize", "name_after_module"]


def canonicalize(graph: Graph, node: Node) -> Node:
    """Rewrite a call to its canonical form, in place. Returns the call that does the work of the module."""
    rewrite = REWRITES.get(node.target)
    if rewrite is not None:
        rewrite(graph, node)
    elif has_operand_roles(node.target):
        duplicate_operands(graph, node)
    return add_batch_dim(graph, node)


def name_after_module(node: Node, exported: Node) -> None:
    """Name the main call of a torch.nn module after the module's path: ``layer1_0_conv1``."""
    stack = list((Meta.nn_module_stack.get(exported) or {}).values())
    if stack and str(stack[-1][1]).startswith("torch.nn.modules") and meta(node).path:
        name = re.sub(r"\W", "_", meta(node).path)
        rename(node, f"{name}_pad" if node.target is aten.pad.default else name)


REWRITES: Mapping[Any, Rewrite] = {
    operator.getitem: outputs.rewrite_output,
    # views and shapes
    aten.view.default: shapes.reshape,
    aten.reshape.default: shapes.reshape,
    aten._unsafe_view.default: shapes.reshape,
    aten.flatten.using_ints: shapes.reshape,
    aten.unflatten.int: shapes.reshape,
    aten.view_as.default: shapes.reshape,
    aten.reshape_as.default: shapes.reshape,
    aten.squeeze.default: shapes.reshape,
    aten.squeeze.dim: shapes.reshape,
    aten.squeeze.dims: shapes.reshape,
    aten.unsqueeze.default: shapes.reshape,
    aten.ravel.default: shapes.reshape,
    aten.expand.default: shapes.expand,
    aten.expand_as.default: shapes.expand,
    aten.transpose.int: shapes.permute,
    aten.swapaxes.default: shapes.permute,
    aten.swapdims.default: shapes.permute,
    aten.t.default: shapes.permute,
    aten.numpy_T.default: shapes.permute,
    aten.mT.default: shapes.permute,
    aten.matrix_H.default: shapes.permute,
    aten.movedim.int: shapes.permute,
    aten.movedim.intlist: shapes.permute,
    aten.slice.Tensor: shapes.simplify_slice,
    aten.narrow.default: shapes.narrow,
    aten.stack.default: shapes.stack,
    aten.cat.default: shapes.concatenate,
    aten.concat.default: shapes.concatenate,
    aten.hstack.default: shapes.hstack,
    aten.pixel_shuffle.default: shapes.pixel_shuffle,
    aten.pixel_unshuffle.default: shapes.pixel_shuffle,
    aten.channel_shuffle.default: shapes.channel_shuffle,
    aten.rot90.default: shapes.rotate,
    # padding
    aten.pad.default: products.crop_before_circular_pad,
    **dict.fromkeys(products.PADDING_MODES, products.pad),
    # convolutions and products
    **dict.fromkeys((*products.CONVOLUTIONS, *products.TRANSPOSED_CONVOLUTIONS), products.convolution),
    aten.addmm.default: products.add_product,
    aten.baddbmm.default: products.add_product,
    aten.linear.default: duplicate_operands,
    aten.dot.default: duplicate_operands,
    aten.vdot.default: duplicate_operands,
    aten.outer.default: duplicate_operands,
    aten.inner.default: duplicate_operands,
    aten.matmul.default: duplicate_operands,
    aten.bmm.default: duplicate_operands,
    aten.mm.default: duplicate_operands,
    aten.einsum.default: duplicate_operands,
    aten.scaled_dot_product_attention.default: duplicate_operands,
    # element-wise operators and reductions
    aten.glu.default: arithmetic.glu,
    aten.rrelu.default: arithmetic.rrelu,
    aten.dropout.default: arithmetic.dropout,
    aten.feature_dropout.default: arithmetic.dropout,
    aten.alpha_dropout.default: arithmetic.dropout,
    aten.feature_alpha_dropout.default: arithmetic.dropout,
    aten.type_as.default: arithmetic.type_as,
    aten.linalg_vector_norm.default: arithmetic.norm,
    aten.norm.Scalar: arithmetic.norm,
    aten.norm.ScalarOpt_dim: arithmetic.norm,
    aten.norm.ScalarOpt_dtype: arithmetic.norm,
    aten.norm.ScalarOpt_dim_dtype: arithmetic.norm,
    aten.count_nonzero.default: arithmetic.count_nonzero,
    aten.count_nonzero.dim_IntList: arithmetic.count_nonzero,
    aten.diff.default: arithmetic.difference,
    # losses
    **LOSSES,
}
"""For each operator that has a canonical form the function that rewrites its calls."""
