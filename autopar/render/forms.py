"""How operators are written: the table of readable forms. Whatever is not in it is written as torch.ops.NAMESPACE.NAME.OVERLOAD.

A form is the Python expression to write, in which the operator's parameters stand by their schema names. Trailing
positional arguments and keyword arguments that are at their schema default are left out; so an operator may have a form
only if the readable function has the same defaults. A parameter that the form does not name must be at its default,
otherwise the generic form is written. `*size` spreads a tuple; REDUCTION[x] looks the argument up in that table and
GIVEN[x] is x, which must not be None. slice, select and index are written with brackets (see calls.py).
"""

from __future__ import annotations

__all__ = ["FORMS", "REDUCTION"]

REDUCTION = {0: "none", 1: "mean", 2: "sum"}  # ATen's enum at::Reduction

POINTWISE = (
    "abs acos asin atan ceil cos cosh erf exp expm1 floor log log1p log2 log10 reciprocal round rsqrt sigmoid sign sin sinh sqrt "
    "square tan tanh real imag view_as_real view_as_complex"
)
ACTIVATIONS = "relu relu6 silu mish hardsigmoid hardswish selu"

# fmt: off
FORMS: dict[str, str] = {
    # arithmetic
    "aten.add.Tensor": "self + other",
    "aten.sub.Tensor": "self - other",
    "aten.subtract.Tensor": "self - other",
    "aten.mul.Tensor": "self * other",
    "aten.multiply.Tensor": "self * other",
    "aten.div.Tensor": "self / other",
    "aten.div.Tensor_mode": "torch.div(self, other, rounding_mode=rounding_mode)",
    "aten.floor_divide.default": "self // other",
    "aten.remainder.Scalar": "self % other",
    "aten.remainder.Tensor": "self % other",
    "aten.rsub.Scalar": "other - self",
    "aten.pow.Tensor_Scalar": "self ** exponent",
    "aten.pow.Tensor_Tensor": "self ** exponent",
    "aten.pow.Scalar": "self ** exponent",
    "aten.neg.default": "-self",
    "aten.matmul.default": "self @ other",
    "aten.bmm.default": "torch.bmm(self, mat2)",
    "aten.mm.default": "torch.mm(self, mat2)",
    "aten.addmm.default": "torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha)",
    "aten.baddbmm.default": "torch.baddbmm(self, batch1, batch2, beta=beta, alpha=alpha)",
    "aten.addcmul.default": "torch.addcmul(self, tensor1, tensor2, value=value)",
    "aten.lerp.Tensor": "torch.lerp(self, end, weight)",
    "aten.outer.default": "torch.outer(self, vec2)",
    "aten.einsum.default": "torch.einsum(equation, *tensors)",
    # comparison and logic
    "aten.eq.Tensor": "self == other",
    "aten.eq.Scalar": "self == other",
    "aten.ne.Tensor": "self != other",
    "aten.ne.Scalar": "self != other",
    "aten.lt.Tensor": "self < other",
    "aten.lt.Scalar": "self < other",
    "aten.le.Tensor": "self <= other",
    "aten.le.Scalar": "self <= other",
    "aten.gt.Tensor": "self > other",
    "aten.gt.Scalar": "self > other",
    "aten.ge.Tensor": "self >= other",
    "aten.ge.Scalar": "self >= other",
    "aten.__and__.Tensor": "self & other",
    "aten.__or__.Tensor": "self | other",
    "aten.__xor__.Tensor": "self ^ other",
    "aten.bitwise_and.Tensor": "self & other",
    "aten.bitwise_or.Tensor": "self | other",
    "aten.bitwise_xor.Tensor": "self ^ other",
    "aten.bitwise_not.default": "~self",
    "aten.logical_and.default": "torch.logical_and(self, other)",
    "aten.logical_or.default": "torch.logical_or(self, other)",
    "aten.logical_not.default": "torch.logical_not(self)",
    "aten.where.self": "torch.where(condition, self, other)",
    "aten.where.ScalarOther": "torch.where(condition, self, other)",
    "aten.where.ScalarSelf": "torch.where(condition, self, other)",
    "aten.where.Scalar": "torch.where(condition, self, other)",
    "aten.maximum.default": "torch.maximum(self, other)",
    "aten.minimum.default": "torch.minimum(self, other)",
    "aten.max.other": "torch.maximum(self, other)",
    "aten.min.other": "torch.minimum(self, other)",
    "aten.clamp.default": "self.clamp(min=min, max=max)",
    "aten.clamp.Tensor": "self.clamp(min=min, max=max)",
    "aten.clip.default": "self.clip(min=min, max=max)",
    "aten.clamp_min.default": "self.clamp_min(min)",
    "aten.clamp_max.default": "self.clamp_max(max)",
    "aten.masked_fill.Scalar": "self.masked_fill(mask, value)",
    "aten.masked_fill.Tensor": "self.masked_fill(mask, value)",
    "aten.masked_scatter.default": "self.masked_scatter(mask, source)",
    # pointwise
    **{f"aten.{name}.default": f"torch.{name}(self)" for name in POINTWISE.split()},
    "aten.polar.default": "torch.polar(abs, angle)",
    "aten.atan2.default": "torch.atan2(self, other)",
    **{f"aten.{name}.default": f"F.{name}(self)" for name in ACTIVATIONS.split()},
    "aten.gelu.default": "F.gelu(self, approximate=approximate)",
    "aten.log_sigmoid.default": "F.logsigmoid(self)",
    "aten.softplus.default": "F.softplus(self, beta=beta, threshold=threshold)",
    "aten.leaky_relu.default": "F.leaky_relu(self, negative_slope=negative_slope)",
    "aten.hardtanh.default": "F.hardtanh(self, min_val=min_val, max_val=max_val)",
    "aten.prelu.default": "F.prelu(self, weight)",
    "aten.glu.default": "F.glu(self, dim=dim)",
    "aten.softmax.int": "F.softmax(self, dim=dim, dtype=dtype)",
    "aten.log_softmax.int": "F.log_softmax(self, dim=dim, dtype=dtype)",
    "aten.dropout.default": "F.dropout(input, p=p, training=train)",
    # layers
    "aten.linear.default": "F.linear(input, weight, bias)",
    "aten.embedding.default": "F.embedding(indices, weight, padding_idx=padding_idx)",
    "aten.scaled_dot_product_attention.default":
        "F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, "
        "scale=scale, enable_gqa=enable_gqa)",
    "aten.layer_norm.default": "F.layer_norm(input, normalized_shape, weight, bias, eps=eps)",
    "aten.rms_norm.default": "F.rms_norm(input, normalized_shape, weight, eps=eps)",
    "aten.group_norm.default": "F.group_norm(input, num_groups, weight, bias, eps=eps)",
    "aten.batch_norm.default":
        "F.batch_norm(input, running_mean, running_var, weight=weight, bias=bias, training=training, momentum=momentum, eps=eps)",
    "aten.conv1d.default":
        "F.conv1d(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)",
    "aten.conv2d.default":
        "F.conv2d(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)",
    "aten.conv3d.default":
        "F.conv3d(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)",
    "aten.conv1d.padding":
        "F.conv1d(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)",
    "aten.conv2d.padding":
        "F.conv2d(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)",
    "aten.conv_transpose1d.default":
        "F.conv_transpose1d(input, weight, bias, stride=stride, padding=padding, output_padding=output_padding, "
        "groups=groups, dilation=dilation)",
    "aten.conv_transpose2d.input":
        "F.conv_transpose2d(input, weight, bias, stride=stride, padding=padding, output_padding=output_padding, "
        "groups=groups, dilation=dilation)",
    "aten.max_pool1d.default":
        "F.max_pool1d(self, kernel_size, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode)",
    "aten.max_pool2d.default":
        "F.max_pool2d(self, kernel_size, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode)",
    "aten.avg_pool1d.default":
        "F.avg_pool1d(self, kernel_size, stride=stride, padding=padding, ceil_mode=ceil_mode, "
        "count_include_pad=count_include_pad)",
    "aten.avg_pool2d.default":
        "F.avg_pool2d(self, kernel_size, stride=stride, padding=padding, ceil_mode=ceil_mode, "
        "count_include_pad=count_include_pad, divisor_override=divisor_override)",
    "aten.adaptive_avg_pool1d.default": "F.adaptive_avg_pool1d(self, output_size)",
    "aten.adaptive_avg_pool2d.default": "F.adaptive_avg_pool2d(self, output_size)",
    "aten.adaptive_avg_pool3d.default": "F.adaptive_avg_pool3d(self, output_size)",
    "aten.pad.default": "F.pad(self, pad, mode=mode, value=value)",
    "aten.pixel_shuffle.default": "F.pixel_shuffle(self, upscale_factor)",
    "aten.pixel_unshuffle.default": "F.pixel_unshuffle(self, downscale_factor)",
    # losses
    "aten.cross_entropy_loss.default":
        "F.cross_entropy(self, target, weight=weight, reduction=REDUCTION[reduction], ignore_index=ignore_index, "
        "label_smoothing=label_smoothing)",
    "aten.nll_loss_nd.default":
        "F.nll_loss(self, target, weight=weight, reduction=REDUCTION[reduction], ignore_index=ignore_index)",
    "aten.mse_loss.default": "F.mse_loss(self, target, reduction=REDUCTION[reduction])",
    "aten.l1_loss.default": "F.l1_loss(self, target, reduction=REDUCTION[reduction])",
    "aten.binary_cross_entropy_with_logits.default":
        "F.binary_cross_entropy_with_logits(self, target, weight=weight, pos_weight=pos_weight, "
        "reduction=REDUCTION[reduction])",
    # shapes
    "aten.view.default": "self.view(*size)",
    "aten.reshape.default": "self.reshape(*shape)",
    "aten.expand.default": "self.expand(*size)",
    "aten.permute.default": "self.permute(*dims)",
    "aten.repeat.default": "self.repeat(*repeats)",
    "aten.transpose.int": "self.transpose(dim0, dim1)",
    "aten.swapaxes.default": "self.swapaxes(axis0, axis1)",
    "aten.t.default": "self.t()",
    "aten.unsqueeze.default": "self.unsqueeze(dim)",
    "aten.squeeze.dim": "self.squeeze(dim)",
    "aten.squeeze.dims": "self.squeeze(dim)",
    "aten.squeeze.default": "self.squeeze()",
    "aten.flatten.using_ints": "self.flatten(start_dim, end_dim)",
    "aten.unflatten.int": "self.unflatten(dim, sizes)",
    "aten.view_as.default": "self.view_as(other)",
    "aten.reshape_as.default": "self.reshape_as(other)",
    "aten.expand_as.default": "self.expand_as(other)",
    "aten.broadcast_to.default": "self.broadcast_to(size)",
    "aten.broadcast_tensors.default": "torch.broadcast_tensors(*tensors)",
    "aten.meshgrid.indexing": "torch.meshgrid(*tensors, indexing=indexing)",
    "aten.contiguous.default": "self.contiguous(memory_format=memory_format)",
    "aten.clone.default": "self.clone(memory_format=memory_format)",
    "aten.detach.default": "self.detach()",
    "aten.cat.default": "torch.cat(tensors, dim=dim)",
    "aten.concat.default": "torch.cat(tensors, dim=dim)",
    "aten.concatenate.default": "torch.cat(tensors, dim=dim)",
    "aten.stack.default": "torch.stack(tensors, dim=dim)",
    "aten.split.Tensor": "torch.split(self, split_size, dim=dim)",
    "aten.split_with_sizes.default": "torch.split(self, split_sizes, dim=dim)",
    "aten.chunk.default": "torch.chunk(self, chunks, dim=dim)",
    "aten.unbind.int": "torch.unbind(self, dim=dim)",
    "aten.unfold.default": "self.unfold(dimension, size, step)",
    "aten.movedim.int": "self.movedim(source, destination)",
    "aten.roll.default": "torch.roll(self, shifts, dims=dims)",
    "aten.flip.default": "self.flip(dims)",
    "aten.tril.default": "torch.tril(self, diagonal=diagonal)",
    "aten.triu.default": "torch.triu(self, diagonal=diagonal)",
    "aten.repeat_interleave.self_int": "self.repeat_interleave(repeats, dim=dim, output_size=output_size)",
    # dtypes
    "aten.to.dtype": "self.to(dtype, copy=copy, memory_format=memory_format)",
    "aten.to.dtype_layout": "self.to(dtype=GIVEN[dtype], device=device, copy=copy, memory_format=memory_format)",
    "aten.to.device": "self.to(dtype=dtype, device=device, copy=copy, memory_format=memory_format)",
    "aten.type_as.default": "self.type_as(other)",
    # reductions
    "aten.sum.default": "self.sum(dtype=dtype)",
    "aten.sum.dim_IntList": "self.sum(dim, keepdim=keepdim, dtype=dtype)",
    "aten.mean.default": "self.mean(dtype=dtype)",
    "aten.mean.dim": "self.mean(dim, keepdim=keepdim, dtype=dtype)",
    "aten.var.dim": "self.var(dim, unbiased=unbiased, keepdim=keepdim)",
    "aten.var.correction": "self.var(dim, correction=correction, keepdim=keepdim)",
    "aten.amax.default": "self.amax(dim, keepdim=keepdim)",
    "aten.amin.default": "self.amin(dim, keepdim=keepdim)",
    "aten.max.default": "self.max()",
    "aten.min.default": "self.min()",
    "aten.max.dim": "torch.max(self, dim, keepdim=keepdim)",
    "aten.min.dim": "torch.min(self, dim, keepdim=keepdim)",
    "aten.argmax.default": "self.argmax(dim, keepdim=keepdim)",
    "aten.argmin.default": "self.argmin(dim, keepdim=keepdim)",
    "aten.logsumexp.default": "torch.logsumexp(self, dim, keepdim=keepdim)",
    "aten.cumsum.default": "torch.cumsum(self, dim, dtype=dtype)",
    "aten.linalg_vector_norm.default": "torch.linalg.vector_norm(self, ord, dim=dim, keepdim=keepdim, dtype=dtype)",
    "aten.any.default": "self.any()",
    "aten.all.default": "self.all()",
    "aten.any.dim": "self.any(dim, keepdim=keepdim)",
    "aten.all.dim": "self.all(dim, keepdim=keepdim)",
    "aten.diff.default": "torch.diff(self, n=n, dim=dim, prepend=prepend, append=append)",
    "aten.topk.default": "torch.topk(self, k, dim=dim, largest=largest, sorted=sorted)",
    "aten.sort.default": "torch.sort(self, dim=dim, descending=descending)",
    "aten.argsort.default": "torch.argsort(self, dim=dim, descending=descending)",
    # indexing (slice, select and index are written with brackets, see SUBSCRIPTS)
    "aten.gather.default": "self.gather(dim, index)",
    "aten.index_select.default": "self.index_select(dim, index)",
    "aten.index_add.default": "self.index_add(dim, index, source, alpha=alpha)",
    "aten.scatter.value": "self.scatter(dim, index, value)",
    "aten.scatter.src": "self.scatter(dim, index, src)",
    "aten.scatter_add.default": "self.scatter_add(dim, index, src)",
    # new tensors (on the device of the mesh unless made like another)
    "aten.arange.default": "torch.arange(end, dtype=dtype, device=device)",
    "aten.arange.start": "torch.arange(start, end, dtype=dtype, device=device)",
    "aten.arange.start_step": "torch.arange(start, end, step, dtype=dtype, device=device)",
    "aten.zeros.default": "torch.zeros(size, dtype=dtype, device=device)",
    "aten.ones.default": "torch.ones(size, dtype=dtype, device=device)",
    "aten.full.default": "torch.full(size, fill_value, dtype=dtype, device=device)",
    "aten.eye.default": "torch.eye(n, dtype=dtype, device=device)",
    "aten.empty.memory_format": "torch.empty(size, dtype=dtype, device=device, memory_format=memory_format)",
    "aten.rand.default": "torch.rand(size, dtype=dtype, device=device)",
    "aten.randn.default": "torch.randn(size, dtype=dtype, device=device)",
    "aten.scalar_tensor.default": "torch.scalar_tensor(s, dtype=dtype, device=device)",
    "aten.linspace.default": "torch.linspace(start, end, steps, dtype=dtype, device=device)",
    "aten.zeros_like.default": "torch.zeros_like(self, dtype=dtype)",
    "aten.ones_like.default": "torch.ones_like(self, dtype=dtype)",
    "aten.empty_like.default": "torch.empty_like(self, dtype=dtype)",
    "aten.rand_like.default": "torch.rand_like(self, dtype=dtype)",
    "aten.randn_like.default": "torch.randn_like(self, dtype=dtype)",
    "aten.full_like.default": "torch.full_like(self, fill_value, dtype=dtype)",
    "aten.new_zeros.default": "self.new_zeros(size, dtype=dtype)",
    "aten.new_ones.default": "self.new_ones(size, dtype=dtype)",
    "aten.new_empty.default": "self.new_empty(size, dtype=dtype)",
    "aten.new_full.default": "self.new_full(size, fill_value, dtype=dtype)",
    # in place
    "aten.add_.Tensor": "self.add_(other, alpha=alpha)",
    "aten.mul_.Tensor": "self.mul_(other)",
    "aten.div_.Tensor": "self.div_(other)",
    "aten.copy_.default": "self.copy_(src)",
    "aten.fill_.Tensor": "self.fill_(value)",
    "aten.fill_.Scalar": "self.fill_(value)",
    "aten.masked_fill_.Scalar": "self.masked_fill_(mask, value)",
    "aten.relu_.default": "self.relu_()",
}
# fmt: on
