// SPDX-License-Identifier: Apache-2.0
/* The few types and constants of the CUDA driver's stable ABI that the launcher uses, declared
 * here so that building needs no CUDA toolkit. */
#ifndef CSA_CUDA_ABI_H
#define CSA_CUDA_ABI_H

#include <stddef.h>

typedef int cu_result;
typedef int cu_device;
typedef struct CUctx_st *cu_context;
typedef struct CUstream_st *cu_stream;
typedef struct CUlib_st *cu_library;
typedef struct CUkern_st *cu_kernel;
typedef struct CUfunc_st *cu_function;

enum {
  CU_SUCCESS = 0,
  CU_ERROR_NOT_INITIALIZED = 3,
  CU_ERROR_INVALID_CONTEXT = 201,
  CU_ERROR_NO_BINARY_FOR_GPU = 209,
  CU_ERROR_SHARED_OBJECT_INIT_FAILED = 303,
  CU_ERROR_NOT_FOUND = 500,
  CU_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
  CU_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
  CU_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
};

enum {
  CU_DEVICE_MULTIPROCESSORS = 16,
  CU_DEVICE_MAJOR = 75,
  CU_DEVICE_MINOR = 76,
  CU_DEVICE_SHARED_OPTIN = 97,
};

enum { CU_FUNC_MAX_DYNAMIC_SHARED = 8 };
enum { CU_CAPTURE_RELAXED = 2 };
enum { CU_CAPTURE_STATUS_NONE = 0 };
enum { CU_LIBRARY_BINARY_PRESERVED = 1 };
enum { CU_LOADING_EAGER = 1 };

/* Keys of cuLaunchKernelEx's `extra`. */
#define CU_PARAM_END ((void *)0)
#define CU_PARAM_BUFFER_POINTER ((void *)1)
#define CU_PARAM_BUFFER_SIZE ((void *)2)

typedef struct cu_launch_config {
  unsigned int grid_x, grid_y, grid_z;
  unsigned int block_x, block_y, block_z;
  unsigned int shared_bytes;
  cu_stream stream;
  void *attributes;
  unsigned int attribute_count;
} cu_launch_config;

_Static_assert(offsetof(cu_launch_config, stream) == 32, "CUlaunchConfig");
_Static_assert(sizeof(cu_launch_config) == 56, "CUlaunchConfig");

#endif
