// SPDX-License-Identifier: Apache-2.0
#include "validate.h"

#include <stdio.h>
#include <string.h>

#include "error.h"
#include "names.h"
#include "tensors.h"

/* sizeof(csa_args) when ABI version 1 was first published. */
enum { ARGS_BYTES_V1 = 200 };
enum { ARGS_BYTES_MAX = 4096 }; /* no later version's either: not to be read to its end */
/* cuDNN frontend's limit, 65535 times 128 columns, kept as it is. Nothing here needs it: column
 * tiles lie along a grid's width, and what grows with ratio * head_dim is counted in 64 bits. */
enum { HEAD_DIM_MAX = 8388480 };
static const int64_t COUNT_END = (int64_t)1 << 31;

int csa_args_accept(const csa_args *args, csa_args *copy, const csa_args **accepted) {
  *accepted = args;
  if (args == NULL)
    return csa_fail(CSA_ERROR_VALUE, "args is NULL; pass a zeroed csa_args with size set");
  size_t size = args->size;
  if (__builtin_expect(size == sizeof *args, 1)) return CSA_OK;
  if (size < ARGS_BYTES_V1)
    return csa_fail(CSA_ERROR_VALUE,
                    "csa_args.size is %zu, not at least %d; zero the struct and set size = "
                    "sizeof(csa_args)",
                    size, ARGS_BYTES_V1);
  if (size > ARGS_BYTES_MAX)
    return csa_fail(CSA_ERROR_VALUE,
                    "csa_args.size is %zu, above %d; zero the struct and set size = "
                    "sizeof(csa_args)",
                    size, ARGS_BYTES_MAX);
  const unsigned char *bytes = (const unsigned char *)args;
  for (size_t i = sizeof *args; i < size; i++)
    if (bytes[i] != 0)
      return csa_fail(CSA_ERROR_VALUE,
                      "csa_args.size is %zu and byte %zu is set; this library knows %zu bytes: use "
                      "the libcsa_runtime.so that belongs to the header, or leave new fields zero",
                      size, i, sizeof *args);
  memset(copy, 0, sizeof *copy);
  memcpy(copy, args, size < sizeof *args ? size : sizeof *args);
  *accepted = copy;
  return CSA_OK;
}

/* "bf16: ratio 2 coff 1, ratio 2 coff 2; fp16: ..." of one operation. */
static const char *families(const struct csa_bundle *bundle, enum csa_operation operation,
                            char *text, size_t bytes) {
  size_t used = 0;
  text[0] = 0;
  for (int32_t dtype = CSA_DTYPE_BF16; dtype <= CSA_DTYPE_FP32; dtype++) {
    const char *separator = NULL;
    for (int32_t i = 0; i < bundle->family_count && used < bytes; i++) {
      const struct csa_family *f = &bundle->families[i];
      if (f->operation != (int32_t)operation || f->dtype != dtype) continue;
      if (separator == NULL)
        used += (size_t)snprintf(text + used, bytes - used, "%s%s: ", used ? "; " : "",
                                 csa_dtype_name(dtype));
      if (used < bytes)
        used += (size_t)snprintf(text + used, bytes - used, "%sratio %d coff %d",
                                 separator != NULL ? separator : "", f->ratio, f->coff);
      separator = ", ";
    }
  }
  return text[0] != 0 ? text : "nothing";
}

static int validate_family(const struct csa_bundle *bundle, enum csa_operation operation,
                           const csa_args *a) {
  if (__builtin_expect(a->dtype < CSA_DTYPE_BF16 || a->dtype > CSA_DTYPE_FP32, 0))
    return csa_fail(CSA_ERROR_VALUE, "dtype is %d; pass 1 (bf16), which this bundle serves",
                    a->dtype);
  if (csa_bundle_family(bundle, (int32_t)operation, a->ratio, a->coff, a->dtype) >= 0)
    return CSA_OK;
  char text[512];
  return csa_fail(
      CSA_ERROR_VALUE, "ratio %d, coff %d, dtype %d (%s): no %s variant; the bundle (%s) serves %s",
      a->ratio, a->coff, a->dtype, csa_dtype_name(a->dtype), csa_operation_name(operation),
      bundle->source, families(bundle, operation, text, sizeof text));
}

static int validate_count(const char *name, int64_t count, int64_t least, int64_t most) {
  if (__builtin_expect(count >= least && count <= most, 1)) return CSA_OK;
  return csa_fail(CSA_ERROR_VALUE, "%s is %lld; pass %lld to %lld", name, (long long)count,
                  (long long)least, (long long)most);
}

int csa_validate_sizes(const struct csa_bundle *bundle, enum csa_operation operation,
                       const csa_args *a) {
  int status = validate_family(bundle, operation, a);
  if (status == CSA_OK) status = validate_count("tokens", a->tokens, 0, COUNT_END - 1);
  if (status == CSA_OK) status = validate_count("segments", a->segments, 0, COUNT_END - 1);
  if (status == CSA_OK) status = validate_count("rows", a->rows, 0, COUNT_END - 1);
  if (status == CSA_OK) status = validate_count("head_dim", a->head_dim, 1, HEAD_DIM_MAX);
  if (status != CSA_OK) return status;
  if (a->rows > 0 && a->tokens < a->ratio)
    return csa_fail(CSA_ERROR_VALUE,
                    "rows is %lld with %lld tokens; rows > 0 needs at least ratio = %d tokens: "
                    "pass rows = 0, or more tokens",
                    (long long)a->rows, (long long)a->tokens, a->ratio);
  if ((a->flags & ~CSA_FLAG_ACCUMULATE) != 0)
    return csa_fail(CSA_ERROR_VALUE,
                    "flags is 0x%x; only 1 (add to grad_ape) is known: clear the other bits",
                    (unsigned)a->flags);
  return CSA_OK;
}

int csa_validate(const struct csa_bundle *bundle, enum csa_operation operation,
                 const csa_args *args) {
  int status = csa_validate_sizes(bundle, operation, args);
  if (status != CSA_OK) return status;
  if (operation == CSA_BACKWARD && args->grad_ape != NULL && args->ape == NULL)
    return csa_fail(CSA_ERROR_VALUE,
                    "grad_ape is given but ape is NULL; without ape there is no grad_ape: pass "
                    "grad_ape = NULL, or ape");
  struct csa_tensors tensors;
  status = csa_tensors_collect(operation, args, &tensors);
  return status == CSA_OK ? csa_tensors_check_overlap(&tensors) : status;
}

int csa_validate_workspace(const csa_args *args, int64_t needed) {
  if (args->grad_ape == NULL || needed == 0) return CSA_OK;
  if (args->workspace == NULL || args->workspace_bytes < needed)
    return csa_fail(CSA_ERROR_VALUE,
                    "workspace is %p of %lld bytes; this call needs %lld: allocate what "
                    "backward_workspace_bytes() says, which always suffices",
                    args->workspace, (long long)args->workspace_bytes, (long long)needed);
  return CSA_OK;
}
