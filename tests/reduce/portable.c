/* The native kernel on numbers that it makes up itself, always the same: one line for each tensor, with a hash of its row
   and of what was kept. Whatever compiles and runs this must print the same. */

#include "../../src/sonde/reduce/cpu/native.c"

#include <stdio.h>

enum { TAME, WIDE, ANY };

static uint32_t draw(void) {
    static uint64_t state = 88172645463325252;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

/* Between -1 and 1; over many powers of two; any bits at all. */
static float number(int kind) {
    uint32_t bits = draw();
    if (kind == TAME)
        return (float)(int32_t)bits / 2147483648.0f;
    return as_float(kind == WIDE ? (bits & 0x807fffff) | (100 + draw() % 60) << 23 : bits);
}

static void put(int dtype, int kind, char *at, int64_t i) {
    float value = draw() % 50 ? number(kind) : 0;
    double wide = value * (double)number(TAME);
    uint16_t half = (uint16_t)(draw() & (kind == ANY ? 0xffff : dtype == FLOAT16 ? 0xbbff : 0xbfff));
    if (dtype == FLOAT32)
        memcpy(at + 4 * i, &value, 4);
    else if (dtype == FLOAT64)
        memcpy(at + 8 * i, &wide, 8);
    else
        memcpy(at + 2 * i, &half, 2);
}

static uint64_t hashed(uint64_t hash, const void *bytes, int64_t num) {
    for (int64_t i = 0; i < num; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    return hash;
}

static int check(int kind, int dtype, int act, int64_t numel) {
    int64_t width = dtype == FLOAT64 ? 8 : 4;
    char *memory[5];
    for (int i = 0; i < 5; i++)
        if (!(memory[i] = malloc((size_t)numel * 8)))
            return 1;
    for (int64_t i = 0; i < numel; i++) {
        put(dtype, kind, memory[0], i);
        put(dtype == FLOAT64 ? FLOAT64 : FLOAT32, kind == ANY ? WIDE : kind, memory[1], i);
        for (int k = 2; k < 5; k++)
            put(FLOAT32, TAME, memory[k], i);
    }
    tensor it = {memory[0], memory[1], numel, dtype, act, 0, NULL, NULL, NULL, 1e-16};
    if (dtype == FLOAT32 && act >= SUBTRACT)
        it.grad = memory[2], it.first_moment = memory[3], it.second_moment = memory[4];
    double row[PAIRED + 3] = {0};
    if (sonde_native_rows(&it, 1, row, PAIRED + 3, NULL, 1))
        return 1;
    for (int i = 0; i < PAIRED + 3; i++)
        row[i] = isnan(row[i]) ? NAN : row[i]; /* which of them it is, is the processor's affair */
    uint64_t hash = hashed(hashed(14695981039346656037u, row, sizeof row), memory[1], numel * width);
    printf("%d %d %d %lld %016llx\n", kind, dtype, act, (long long)numel, (unsigned long long)hash);
    for (int i = 0; i < 5; i++)
        free(memory[i]);
    return 0;
}

int main(void) {
    const int64_t sizes[] = {1, 15, 16, 17, 256, SEGMENT - 1, SEGMENT, SEGMENT + 1, 100003};
    for (int kind = TAME; kind <= ANY; kind++)
        for (int dtype = FLOAT32; dtype <= FLOAT64; dtype++)
            for (int act = SKETCH; act <= SUBTRACT_INTO; act++)
                for (int i = 0; i < 9; i++)
                    if (check(kind, dtype, act, sizes[i]))
                        return 1;
    return 0;
}
