#include <stdlib.h>
struct S { S(){ abort(); } } s;
int main(){}
