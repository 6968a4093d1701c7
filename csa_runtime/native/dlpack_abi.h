// SPDX-License-Identifier: Apache-2.0
/* The part of DLPack's stable ABI (version 1) by which a framework tells C what a tensor is: the
 * table behind `__dlpack_c_exchange_api__`, up to what is used. Declared here so that building
 * needs no framework. */
#ifndef CSA_DLPACK_ABI_H
#define CSA_DLPACK_ABI_H

#include <stddef.h>
#include <stdint.h>

#define DL_EXCHANGE_API_NAME "dlpack_exchange_api" /* of the capsule that holds the table */

enum { DL_MAJOR_VERSION = 1 };
enum { DL_CUDA = 2 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4 };

typedef struct dl_tensor {
  void *data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides; /* in elements */
  uint64_t byte_offset;
} dl_tensor;

_Static_assert(offsetof(dl_tensor, code) == 20, "DLTensor");
_Static_assert(offsetof(dl_tensor, shape) == 24, "DLTensor");
_Static_assert(sizeof(dl_tensor) == 48, "DLTensor");

typedef struct dl_exchange_api {
  uint32_t major, minor;
  struct dl_exchange_api *previous;
  void *allocate, *from_object, *to_object;
  /* Describes a framework's object; what it points to belongs to the object. 0, or -1 with a Python
   * exception. May be NULL. */
  int (*describe)(void *object, dl_tensor *tensor);
} dl_exchange_api;

_Static_assert(offsetof(dl_exchange_api, describe) == 40, "DLPackExchangeAPI");

#endif
