"""Which torch functions, by name, work on the parts of parameters in which way (see `parts`)."""

from __future__ import annotations

__all__ = [
    "ATTRIBUTES_OF_THE_SHAPE", "ELEMENTWISE", "IN_PLACE", "ITSELF", "ITSELF_BY_SHAPE", "ITSELF_OF_PARAMETERS", "LARGEST", "NORMS",
    "NOT_COPIED", "OF_THE_OBJECT", "OF_THE_SHAPE", "OF_THE_WHOLE_ATTRIBUTES", "RANDOM", "SCALES_LIKE", "SHOWN", "STORAGES", "VIEWS",
    "WRITES_UNSEEN",
]  # fmt: skip


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names("""
    abs absolute add addcdiv addcmul bfloat16 ceil clamp clamp_max clamp_min clip clone copysign cos cosh deg2rad detach div divide double
    empty_like eq erf exp exp2 expm1 float floor floor_divide fmax fmin fmod ge greater gt half hardtanh heaviside hypot isfinite isinf
    isnan le lerp less log log10 log1p log2 logical_and logical_not logical_or logical_xor lt maximum minimum mul multiply nan_to_num ne
    neg negative not_equal ones_like pow reciprocal relu remainder round rsqrt rsub sgn sigmoid sign sin sinh sqrt square sub subtract
    tan tanh true_divide trunc zeros_like where bitwise_and bitwise_or bitwise_not logit softplus
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __div__ __pow__ __rpow__ __neg__ __abs__ __eq__
    __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __invert__ __mod__ __floordiv__ __pos__ positive
""")  # fmt: skip
IN_PLACE = _names("""
    abs_ add_ addcdiv_ addcmul_ ceil_ clamp_ clamp_max_ clamp_min_ clip_ copy_ div_ divide_ exp_ fill_ floor_ lerp_ log_ mul_ multiply_
    nan_to_num_ neg_ pow_ reciprocal_ relu_ round_ rsqrt_ sigmoid_ sign_ sqrt_ square_ sub_ subtract_ tanh_ true_divide_ trunc_ zero_
    __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__
""")  # fmt: skip
SCALES_LIKE = _names("zeros_like ones_like empty_like full_like")
ITSELF = _names("to type float double half bfloat16 positive __pos__")  # may give the tensor itself
ITSELF_OF_PARAMETERS = _names("""
    conj conj_physical contiguous dequantize real resolve_conj resolve_neg to_dense type_as
""")  # of other tensors (`state_dict()`) people save what these give: the whole
ITSELF_BY_SHAPE = _names("atleast_1d atleast_2d flatten sum_to_size")  # of parameters too
VIEWS = _names("""
    T H mT mH real imag __getitem__ as_strided chunk diagonal expand expand_as flatten movedim moveaxis narrow permute ravel reshape
    reshape_as select split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsqueeze view
    view_as view_as_complex view_as_real
""")  # fmt: skip
OF_THE_OBJECT = _names("""
    requires_grad_ retain_grad is_floating_point is_complex is_signed get_device element_size
    is_inference is_shared has_names _is_view data_ptr untyped_storage storage_offset backward is_pinned is_neg is_conj dim_order __hash__
    is_same_size is_tensor is_storage
""")  # fmt: skip
OF_THE_SHAPE = _names("size numel nelement dim ndimension __len__ stride is_contiguous")
ATTRIBUTES_OF_THE_SHAPE = _names("shape ndim nbytes")
OF_THE_WHOLE_ATTRIBUTES = _names("T H mT mH real imag")
NORMS = _names("norm vector_norm linalg_norm linalg_vector_norm")
LARGEST = {"max": max, "amax": max, "min": min, "amin": min}
STORAGES = _names("storage untyped_storage _typed_storage")
SHOWN = _names("__repr__ __format__ __str__")
NOT_COPIED = _names("__reduce_ex__ __deepcopy__ __reduce__")
WRITES_UNSEEN = _names("batch_norm instance_norm native_batch_norm cudnn_batch_norm")  # to running statistics, which do not count it
RANDOM = _names("rand_like randn_like randint_like bernoulli multinomial normal dropout poisson alpha_dropout feature_dropout")
