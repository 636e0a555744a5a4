/* bcryptprimitives.dll for Wine before 8.x, which has none: Rust's standard library takes its random
 * numbers from there. For tests only; Windows has its own. */
#include <windows.h>

BOOLEAN WINAPI SystemFunction036(PVOID buffer, ULONG length); /* RtlGenRandom, in advapi32 */

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE buffer, SIZE_T length)
{
    while (length > 0) {
        ULONG piece = length > 0x40000000 ? 0x40000000 : (ULONG)length;
        if (!SystemFunction036(buffer, piece))
            return FALSE;
        buffer += piece;
        length -= piece;
    }
    return TRUE;
}
