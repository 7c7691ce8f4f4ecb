#include <unistd.h>
#include <stdio.h>
int main(){ char a[] = "/bin/sh", b[] = "-c", c[] = "echo ran"; char* v[] = {a, b, c, nullptr}; execve(a, v, nullptr); puts("refused"); }
