#include <stdio.h>
int f(volatile int* p){ volatile int a[1000]; a[0] = *p + 1; return f(a) + a[1]; }
int main(){ volatile int x = 0; printf("%d", f(&x)); }
