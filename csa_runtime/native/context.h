// SPDX-License-Identifier: Apache-2.0
/* The context a call runs in, entered and left so that the caller's stays current. */
#ifndef CSA_CONTEXT_H
#define CSA_CONTEXT_H

#include "device.h"

struct csa_scope {
  int pushed;
  int release; /* give back the primary context of `device` */
  cu_device device;
  uint64_t context; /* the id of the context entered */
};

/* Enter the context of `stream`; for the handles 0, 1 and 2 the current one if it is the device's,
 * else the device's primary one. CSA_ERROR_VALUE for another device's stream. After a failure
 * nothing has changed. */
int csa_context_enter(struct csa_device *device, cu_stream stream, struct csa_scope *scope);

/* Enter the device's primary context, which stays retained. */
int csa_context_enter_primary(struct csa_device *device, struct csa_scope *scope);

/* Undo one of the above; returns `status`, or its own failure where that was CSA_OK. */
int csa_context_leave(const struct csa_scope *scope, int status);

/* Let this thread load although streams may be capturing, and put the mode back. */
int csa_capture_relax(int *mode);
int csa_capture_restore(int mode, int status);

#endif
