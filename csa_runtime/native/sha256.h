// SPDX-License-Identifier: Apache-2.0
/* SHA-256 (FIPS 180-4) of a buffer. */
#ifndef CSA_SHA256_H
#define CSA_SHA256_H

#include <stddef.h>
#include <stdint.h>

void csa_sha256(const void *data, size_t bytes, uint8_t digest[32]);

#endif
