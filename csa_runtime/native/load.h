// SPDX-License-Identifier: Apache-2.0
/* Images become kernels: once each, under a relaxed capture mode, never unloaded. */
#ifndef CSA_LOAD_H
#define CSA_LOAD_H

#include "device.h"

/* Make a variant's kernel ready on `device` in the current context, whose id is `context`. `stream`
 * is what it will be launched on: a driver before CUDA 12.3 cannot load while that is capturing. */
int csa_load_variant(const struct csa_bundle *bundle, struct csa_device *device, int32_t variant,
                     uint64_t context, cu_stream stream);

/* Load every image of the device's architecture and finish it in the primary context, and in the
 * current one if that is the device's too. */
int csa_load_all(const struct csa_bundle *bundle, struct csa_device *device);

#endif
