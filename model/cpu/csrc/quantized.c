#include "pk.h"
size_t quantized_panel_bytes(int kind, int depth) { (void)kind; (void)depth; return 0; }
void quantized_panel(const pk_matrix *w, int panel, const act *x, int rows, float *y) { (void)w; (void)panel; (void)x; (void)rows; (void)y; }
