// SPDX-License-Identifier: Apache-2.0
/* The public ABI, frozen: a line here that no longer holds breaks every compiled caller. */
#include <stddef.h>

#include "csa_runtime.h"

#define AT(field, offset) _Static_assert(offsetof(csa_args, field) == (offset), "csa_args." #field)

AT(size, 0);
AT(device, 4);
AT(ratio, 8);
AT(coff, 12);
AT(dtype, 16);
AT(flags, 20);
AT(tokens, 24);
AT(segments, 32);
AT(rows, 40);
AT(head_dim, 48);
AT(kv, 56);
AT(score, 64);
AT(ape, 72);
AT(cu_seqlens, 80);
AT(cu_seqlens_comp, 88);
AT(out, 96);
AT(grad_out, 104);
AT(grad_kv, 112);
AT(grad_score, 120);
AT(grad_ape, 128);
AT(workspace, 136);
AT(workspace_bytes, 144);
AT(kv_stride, 152);
AT(score_stride, 160);
AT(out_stride, 168);
AT(grad_out_stride, 176);
AT(grad_kv_stride, 184);
AT(grad_score_stride, 192);
_Static_assert(sizeof(csa_args) == 200, "fields are appended, never changed");
_Static_assert(_Alignof(csa_args) == 8, "alignment of csa_args");

_Static_assert(CSA_OK == 0 && CSA_ERROR_VALUE == 1 && CSA_ERROR_ARCH == 2, "error codes");
_Static_assert(CSA_ERROR_DRIVER == 3 && CSA_ERROR_BUNDLE == 4 && CSA_ERROR_MEMORY == 5,
               "error codes");
_Static_assert(CSA_DTYPE_BF16 == 1 && CSA_DTYPE_FP16 == 2 && CSA_DTYPE_FP32 == 3, "dtype codes");
_Static_assert(CSA_FLAG_ACCUMULATE == 1, "flags");
_Static_assert(CSA_ABI_VERSION == 1, "ABI version");
