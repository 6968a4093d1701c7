# SPDX-License-Identifier: Apache-2.0
"""Device code in CuTe-DSL.

A kernel and its `entry` a file: forward and backward; forward_long and backward_long, for windows
that a block's warps share; finish, backward's second launch. Below them lie window and window_long,
a row's window as a thread and as a warp sees it; segments, which finds where rows start; and
memory, bf16, arithmetic and ptx, which know nothing of the operation.

Words: a row's or a segment's block is `ratio` tokens, any other block is one of threads. A tile is
the columns, or the rows, that a block of threads works on at a time. `first` and `last` say whether
a row's block is its segment's first or last. Pooled tokens are those in a computed row's block.
"""
