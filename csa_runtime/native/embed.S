// SPDX-License-Identifier: Apache-2.0
/* The packed bundle, unchanged, in read-only memory. The driver wants images 64-byte aligned. */
    .section .rodata
    .balign 64
    .globl csa_embedded_begin
    .hidden csa_embedded_begin
    .globl csa_embedded_end
    .hidden csa_embedded_end
csa_embedded_begin:
    .incbin CSA_BUNDLE_FILE
csa_embedded_end:
    .byte 0
    .section .note.GNU-stack,"",%progbits
