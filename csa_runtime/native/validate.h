// SPDX-License-Identifier: Apache-2.0
/* Everything that can be wrong with arguments, found before any driver call. Each message says what
 * was given, what is allowed and what to do. */
#ifndef CSA_VALIDATE_H
#define CSA_VALIDATE_H

#include "bundle.h"
#include "csa_runtime.h"

/* `args` as this library's own csa_args: itself, or `copy` filled from an older caller's shorter
 * struct (missing fields are zero). A newer caller's longer one must be zero where we end. */
int csa_args_accept(const csa_args *args, csa_args *copy, const csa_args **accepted);

/* ratio, coff, dtype, flags and counts alone. */
int csa_validate_sizes(const struct csa_bundle *bundle, enum csa_operation operation,
                       const csa_args *args);

/* Sizes, then pointers, alignment, strides and overlap. */
int csa_validate(const struct csa_bundle *bundle, enum csa_operation operation,
                 const csa_args *args);

/* Backward's workspace against the plan's `needed` bytes. */
int csa_validate_workspace(const csa_args *args, int64_t needed);

#endif
