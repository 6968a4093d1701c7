// SPDX-License-Identifier: Apache-2.0
/* Gated-softmax pooling over windows of tokens, packed (THD) layout: forward and backward.
 *
 * Link with libcsa_runtime.so. The CUDA driver is opened on first use, never linked; no other
 * library is needed. Every function is safe to call from any thread.
 *
 * Example: four tokens of one segment, ratio 4, coff 1, head_dim 128, on device 0.
 *
 *   csa_args args;
 *   memset(&args, 0, sizeof(args));
 *   args.size = sizeof(args);
 *   args.ratio = 4, args.coff = 1, args.dtype = CSA_DTYPE_BF16;
 *   args.tokens = 4, args.segments = 1, args.rows = 1, args.head_dim = 128;
 *   args.kv = kv, args.score = score, args.ape = ape, args.out = out;
 *   args.cu_seqlens = cu_seqlens, args.cu_seqlens_comp = cu_seqlens_comp;
 *   args.kv_stride = args.score_stride = args.out_stride = 128;
 *   if (csa_forward(&args, stream) != CSA_OK) puts(csa_last_error());
 */
#ifndef CSA_RUNTIME_H
#define CSA_RUNTIME_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define CSA_API __attribute__((visibility("default")))
#else
#define CSA_API
#endif

/* Incremented when an existing caller would have to change; appending a field to csa_args is not
 * such a change. */
#define CSA_ABI_VERSION 1

/* What the functions return. csa_last_error() has the details. */
#define CSA_OK 0
#define CSA_ERROR_VALUE 1  /* malformed arguments; nothing was launched or written */
#define CSA_ERROR_ARCH 2   /* the bundle holds no image for the device */
#define CSA_ERROR_DRIVER 3 /* no driver, too old a driver, or a driver call failed */
#define CSA_ERROR_BUNDLE 4 /* the bundle is damaged, of another schema, or chosen too late */
#define CSA_ERROR_MEMORY 5 /* no host memory */

/* csa_args.dtype: the element of kv, score, out and their gradients. The bundle holds BF16; the
 * others are refused with CSA_ERROR_VALUE. */
#define CSA_DTYPE_BF16 1
#define CSA_DTYPE_FP16 2
#define CSA_DTYPE_FP32 3

/* csa_args.flags */
#define CSA_FLAG_ACCUMULATE 1 /* add to grad_ape instead of overwriting it */

/* One problem. With T = tokens, B = segments, d = head_dim, W = coff * d:
 *   kv, score, grad_kv, grad_score  (T, W)     dtype
 *   ape, grad_ape                   (ratio, W) fp32, contiguous; ape may be NULL (zeros), and then
 *                                              grad_ape must be NULL too
 *   cu_seqlens, cu_seqlens_comp     (B + 1)    int32, contiguous
 *   out, grad_out                   (rows, d)  dtype
 * all in device memory, aligned to their element. Strides are the distance of two rows in elements:
 * inputs >= 0 (0 repeats one row), outputs >= the row's width; a tensor of at most one row ignores
 * its stride. T, B and rows are below 2**31; rows > 0 needs T >= ratio. Outputs and workspace
 * overlap no input and no other output. An empty tensor may be NULL. Fields that a direction does
 * not use (out for backward, grad_* for forward) are ignored.
 *
 * Zero it, set size = sizeof(csa_args): fields are only ever appended, and zero means "as before".
 */
typedef struct csa_args {
  uint32_t size;
  int32_t device; /* CUDA ordinal */
  int32_t ratio, coff, dtype, flags;
  int64_t tokens, segments, rows, head_dim;
  const void *kv, *score;
  const float *ape;
  const int32_t *cu_seqlens, *cu_seqlens_comp;
  void *out;
  const void *grad_out;
  void *grad_kv, *grad_score;
  float *grad_ape;         /* NULL: not wanted */
  void *workspace;         /* backward with grad_ape: 16-byte aligned, uninitialised scratch */
  int64_t workspace_bytes; /* at least what csa_backward_workspace_bytes() says always suffices */
  int64_t kv_stride, score_stride, out_stride, grad_out_stride, grad_kv_stride, grad_score_stride;
} csa_args;

/* Enqueue one direction on `stream` (a CUstream or cudaStream_t; NULL, 1 and 2 are the special
 * handles) and return. The call runs in the stream's own context; for the special handles in the
 * current context if it belongs to args->device, else in the device's primary one. The caller's
 * current context is as before. A stream of another device is CSA_ERROR_VALUE. Capturing streams
 * are fine, also for a process's first call (with a CUDA 12.3 driver). No allocation, no lock and
 * no synchronisation once the kernels are finished in the context (csa_load).
 *
 * csa_backward writes every element of grad_kv, grad_score and (if not NULL) grad_ape. */
CSA_API int csa_forward(const csa_args *args, void *stream);
CSA_API int csa_backward(const csa_args *args, void *stream);

/* Bytes of workspace that suffice for csa_backward on every device and for every alignment:
 * depends on ratio, coff, dtype and head_dim of `args` alone; needs no driver. */
CSA_API int csa_backward_workspace_bytes(const csa_args *args, int64_t *bytes);

/* Load every kernel of a device's architecture and finish it in the primary context, and in the
 * current one if it is the device's, so that no later launch there loads anything. In another
 * context a kernel is finished before its first launch there.
 * device: a CUDA ordinal, or -1 for the current context's (0 without one).
 * bundle: path of a bundle.bin to use in place of the embedded one, or NULL. It is chosen once per
 * process, before anything else used a bundle; naming the same path again is fine. */
CSA_API int csa_load(int32_t device, const char *bundle);

/* Message of this thread's latest failure; "" if there was none. Valid until its next failure. */
CSA_API const char *csa_last_error(void);

/* CSA_ABI_VERSION of the library, to compare with the header's. */
CSA_API int csa_abi_version(void);

#ifdef __cplusplus
}
#endif
#endif
